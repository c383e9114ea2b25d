"""Hashes of files."""

from pathlib import Path

from specprefill_jax.artifact.hashing import describe_files, sha256_of
from specprefill_jax.artifact.manifest import FileEntry

# FIPS 180-2, appendix B.1, and the hash of nothing.
SHA256_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
SHA256_NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_the_standards_example_has_its_hash(tmp_path: Path):
    (tmp_path / "abc").write_bytes(b"abc")
    (tmp_path / "empty").write_bytes(b"")
    assert sha256_of(tmp_path / "abc") == SHA256_ABC
    assert sha256_of(tmp_path / "empty") == SHA256_NOTHING


def test_progress_hears_every_byte_of_a_file_longer_than_one_read(tmp_path: Path):
    (tmp_path / "long").write_bytes(bytes(20 << 20))
    heard: list[int] = []
    sha256_of(tmp_path / "long", heard.append)
    assert sum(heard) == 20 << 20
    assert len(heard) == 3


def test_every_file_but_the_manifest_and_rates_is_described_in_order(tmp_path: Path):
    for name in ("b", "manifest.json", "rates.json", "a/c"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"abc")
    entry = FileEntry(SHA256_ABC, 3)
    found = describe_files(tmp_path)
    assert found == {"a/c": entry, "b": entry}
    assert list(found) == ["a/c", "b"]
