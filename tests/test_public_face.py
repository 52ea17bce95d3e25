"""The public names: complete, sorted, and each really there."""

import pickle

import pytest

import vitral


def test_all_names_are_listed_and_there() -> None:
    assert vitral.__all__ == sorted(vitral.__all__)
    for name in vitral.__all__:
        assert getattr(vitral, name) is not None
    assert set(vitral._HOME) | {"__version__"} == set(vitral.__all__)
    assert set(vitral.__all__) <= set(dir(vitral))


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'vitral' has no attribute 'trian'"):
        vitral.trian  # noqa: B018


def test_every_error_is_a_vitral_error() -> None:
    errors = [getattr(vitral, name) for name in vitral.__all__ if name.endswith("Error")]
    assert all(issubclass(error, vitral.VitralError) for error in errors)
    error = vitral.ConfigError("heads=7 does not divide width=768.", hint="Use heads=8.")
    assert str(error) == "heads=7 does not divide width=768. Use heads=8."
    assert error.hint == "Use heads=8."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # crosses the borders of processes
