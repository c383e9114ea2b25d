"""The command as a whole: help, version, pipes."""

import os
import subprocess
import sys

import pytest

from specprefill_jax import __version__
from tests.cli.conftest import Run


def test_help_lists_the_commands(specprefill: Run):
    ran = specprefill("--help")
    assert ran.status == 0
    for verb in ("run", "score", "compile", "tune", "plan", "devices"):
        assert f"\n    {verb} " in ran.out


@pytest.mark.parametrize("verb", ["run", "score", "compile", "tune", "plan", "devices"])
def test_each_command_has_help_that_fits_a_screen(specprefill: Run, verb: str):
    ran = specprefill(verb, "--help")
    assert ran.status == 0
    assert len(ran.out.splitlines()) <= 75


def test_help_names_the_environment_variable_of_a_setting(specprefill: Run):
    words = " ".join(specprefill("run", "--help").out.split())
    assert (
        "--keep X fraction of tokens to keep (default: 0.3); setting it selects by fraction [SP_KEEP_PCT]"
        in words
    )
    assert "--select-mode mass|chunk" in words
    assert "--max-keep X most tokens to keep" in words


def test_the_version_is_the_packages(specprefill: Run):
    assert specprefill("--version") == (0, f"specprefill-jax {__version__}\n", "")


def test_no_command_is_bad_usage(specprefill: Run):
    assert specprefill().status == 2


def test_a_reader_that_goes_away_ends_the_command_quietly():
    command = "import sys; from specprefill_jax.cli import main; sys.exit(main(['devices', '--json']))"
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-c", command], stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")
