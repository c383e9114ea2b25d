from pathlib import Path

from specprefill_jax.artifact.host import cpu_flags, cpu_name


def test_the_first_processor_speaks_for_all(tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert cpu_flags(cpuinfo) == {"fpu", "avx2"}
    assert cpu_name(cpuinfo) == "A CPU"


def test_arm_calls_its_flags_features(tmp_path: Path):
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_flags(tmp_path / "arm") == {"fp", "asimd"}


def test_a_system_without_cpuinfo_tells_nothing(tmp_path: Path):
    assert cpu_flags(tmp_path / "absent") == frozenset()
    assert cpu_name(tmp_path / "absent") == "CPU"
