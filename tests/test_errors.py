"""Errors: one family, so that a caller can tell our refusals from faults."""

import inspect

from specprefill_jax import errors


def test_every_error_is_a_specprefill_error_and_says_what_situation_it_is_for():
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    assert len(classes) == 31
    for error in classes:
        assert issubclass(error, errors.SpecPrefillError)
        assert error.__doc__


def test_a_changed_file_is_caught_by_whoever_catches_artifact_errors():
    assert issubclass(errors.HashMismatch, errors.ArtifactError)
