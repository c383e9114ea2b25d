"""Settings: where values come from, which win, and what a bad one is told."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from specprefill_jax.errors import FileMissing, SettingError
from specprefill_jax.settings import Head, Settings, knobs

# The table "Configuration Reference" of the SpecPrefill guide, v3.1, and SP_POOL, which is ours.
GUIDE_DEFAULTS = {
    "SP_CHUNK": 32,
    "SP_LOOKAHEAD": 2,
    "SP_SPEC_CTX": 8192,
    "SP_WINDOW": 0,
    "SP_MAX_KEEP": 2000,
    "SP_KEEP_PCT": 0.3,
    "SP_SELECT_MODE": "mass",
    "SP_CUMULATIVE_MASS": 0.85,
    "SP_BOOST_FIRST_MULT": 1.5,
    "SP_BOOST_FIRST_N": 64,
    "SP_BOOST_LAST_MULT": 1.3,
    "SP_BOOST_LAST_N": 128,
    "SP_BREAK_EVEN": True,
    "SP_SPEC_THROUGHPUT": 0,
    "SP_BREAK_EVEN_SAFETY": 1.2,
    "SP_POOL": 13,
}

SIZES = "a size above 0: bytes, or like 16G (16 * 1000^3 bytes), 11.5GiB (11.5 * 1024^3) or 800M"
BAD_SIZES = ("0", "0.5", "-1", "16X", "16iB", "G", "1e9", "16 G B", "1,5G", 1.5e9, True, [16])

HEADS = "heads like 2.0,5.3 (attention layer 2, head 0, ..; from 0), or all"
BAD_HEADS = (0, 7, False, True, 1.2, {}, {"0": "1"}, "7", "0.1,", "-1.2", "", [""], [7], [None], [[0, 1, 2]])
BAD_HEADS += (
    [[0.7, 1.2]],
    [[True, 1]],
    [[-1, 2]],
    ["0.1", [0]],
    [["0", "1"]],
    ["all", "0.1"],
    [{0: 1, 2: 3}],
)

ROLES_ALLOWED = "names separated by commas, of system, tools, last_user, user, assistant, tool; or none"


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "settings.toml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_variables_have_the_guides_names_and_defaults():
    settings = Settings()
    ours = {knob.env: getattr(settings, name) for name, knob in knobs().items() if knob.env}
    in_force = {
        "SP_SPEC_CTX": settings.draft_context,
        "SP_WINDOW": settings.window or 0,
        "SP_KEEP_PCT": settings.keep_fraction,
        "SP_SELECT_MODE": settings.selection,
    }
    assert ours | in_force == GUIDE_DEFAULTS


def test_selection_is_by_mass_until_a_fraction_is_set_and_a_mode_given_wins():
    assert Settings().selection == "mass"
    assert Settings(keep=0.3).selection == "chunk"  # set, though it is the default
    assert Settings.resolve(environ={"SP_KEEP_PCT": "0.2"}).selection == "chunk"
    assert Settings.resolve({"keep": 0.2, "select_mode": "mass"}).selection == "mass"
    assert Settings.resolve(environ={"SP_SELECT_MODE": "chunk"}).selection == "chunk"


def test_scoring_is_continuous_until_a_window_or_its_context_is_set():
    assert Settings().scoring == "continuous"
    assert Settings.resolve(environ={"SP_WINDOW": "0"}).scoring == "windows"  # automatic, but windows
    assert Settings.resolve(environ={"SP_WINDOW": "2000"}).scoring == "windows"
    assert Settings.resolve({"spec_ctx": 8192}).scoring == "windows"


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(toml: Callable[[str], Path]):
    file = toml("chunk = 8\nlookahead = 8\npool = 5\n")
    environ = {"SP_CHUNK": "16", "SP_LOOKAHEAD": "4"}
    settings = Settings.resolve({"chunk": 64, "pool": None}, environ, file)
    assert (settings.chunk, settings.lookahead, settings.pool, settings.max_keep) == (64, 4, 5, 2000)
    assert settings.origins["chunk"].holding(64) == "--chunk=64"
    assert settings.origins["lookahead"].holding(4) == "SP_LOOKAHEAD=4 in the environment"
    assert settings.origins["pool"].holding(5) == f"pool=5 in {file}"
    assert "max_keep" not in settings.origins


def test_an_empty_variable_counts_as_not_set():
    assert Settings.resolve(environ={"SP_KEEP_PCT": ""}) == Settings()


def test_text_becomes_the_knobs_type():
    settings = Settings.resolve(environ={"SP_KEEP_PCT": "1", "SP_BREAK_EVEN": "Off", "SP_CHUNK": " 8 "})
    assert settings.keep == 1.0
    assert isinstance(settings.keep, float)
    assert settings.break_even is False
    assert settings.chunk == 8


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("16G", 16_000_000_000),
        ("16GB", 16_000_000_000),
        ("16GiB", 17_179_869_184),
        ("11.5GiB", 12_348_030_976),
        ("0.7 gib", 751_619_276),
        ("800M", 800_000_000),
        ("64k", 64_000),
        ("1T", 10**12),
        ("123456", 123_456),
        ("123456b", 123_456),
        (" 16g ", 16_000_000_000),
        (123_456, 123_456),
    ],
)
def test_memory_is_read_in_powers_of_1000_or_1024_as_written(written: str | int, size: int):
    assert Settings.resolve({"memory": written}).memory == size


def test_no_memory_limit_is_known_unless_it_is_set(toml: Callable[[str], Path]):
    assert Settings().memory is None
    assert Settings.resolve(file=toml('memory = "15GiB"\n')).memory == 15 * 2**30


def test_a_file_sets_every_kind_of_value(toml: Callable[[str], Path]):
    file = toml('mode = "sparse"\nenabled = false\nkeep = 1\nminimum_tokens = 0\nseed = 7\n')
    settings = Settings.resolve(file=file)
    assert settings.mode == "sparse"
    assert settings.enabled is False
    assert settings.keep == 1.0
    assert settings.minimum_tokens == 0
    assert settings.seed == 7


@pytest.mark.parametrize(
    ("written", "roles"),
    [
        ("system,tools", ("system", "tools")),
        (" user , system ", ("user", "system")),
        ("tool,tool", ("tool",)),
        (["assistant"], ("assistant",)),
        ("none", ()),
        ("", ()),
    ],
)
def test_roles_are_written_with_commas_or_as_a_list(written: object, roles: tuple[str, ...]):
    assert Settings.resolve({"pin_roles": written}).pin_roles == roles


def test_by_default_system_tools_and_the_last_user_message_are_pinned_and_tools_guarded_by_span():
    assert Settings().pin_roles == ("system", "tools", "last_user")
    assert Settings().tool_guard == "spans"


@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("keep", "abc", "keep must be a number from 0 to 1"),
        ("keep", "-0.1", "keep must be a number from 0 to 1"),
        ("keep", "30", "keep must be a number from 0 to 1"),
        ("keep", "nan", "keep must be a number from 0 to 1"),
        ("keep", True, "keep must be a number from 0 to 1"),
        ("cumulative_mass", "0", "cumulative_mass must be a number above 0, at most 1"),
        ("cumulative_mass", "1.01", "cumulative_mass must be a number above 0, at most 1"),
        ("chunking", "lines", "chunking must be one of text, fixed"),
        ("halo", "2", "halo must be on or off (also 1, 0, true, false, yes, no)"),
        ("normalizer", "rank", "normalizer must be one of minmax, clip, zscore"),
        ("chunk", "0", "chunk must be a whole number, 1 or more"),
        ("chunk", "3.5", "chunk must be a whole number, 1 or more"),
        ("chunk", 3.5, "chunk must be a whole number, 1 or more"),
        ("chunk", True, "chunk must be a whole number, 1 or more"),
        ("chunk", [32], "chunk must be a whole number, 1 or more"),
        ("lookahead", "-1", "lookahead must be a whole number, 0 or more"),
        ("max_keep", "-1", "max_keep must be a whole number, 0 or more"),
        ("pool", "12", "pool must be 0 (no pooling) or an odd number of tokens"),
        ("pool", "-13", "pool must be 0 (no pooling) or an odd number of tokens"),
        ("spec_ctx", "639", "spec_ctx must be a whole number, 640 or more"),
        ("window", "-512", "window must be a whole number, 0 or more"),
        ("select_mode", "top", "select_mode must be one of mass, chunk"),
        ("mode", "fast", "mode must be one of auto, sparse, dense"),
        ("boost_first_mult", "0", "boost_first_mult must be a number above 0"),
        ("boost_last_mult", "inf", "boost_last_mult must be a number above 0"),
        ("boost_last_n", "-1", "boost_last_n must be a whole number, 0 or more"),
        ("break_even", "maybe", "break_even must be on or off (also 1, 0, true, false, yes, no)"),
        ("spec_throughput", "-1", "spec_throughput must be a number, 0 or more"),
        ("temperature", "-1", "temperature must be a number, 0 or more"),
        ("temperature", "inf", "temperature must be a number, 0 or more"),
        ("temperature", 10**400, "temperature must be a number, 0 or more"),
        ("top_p", "0", "top_p must be a number above 0, at most 1"),
        ("min_p", "2", "min_p must be a number from 0 to 1"),
        ("minimum_tokens", "-1", "minimum_tokens must be a whole number, 0 or more"),
        ("tool_guard", "on", "tool_guard must be one of spans, strict, off"),
        ("pin_roles", "system,admin", f"pin_roles must be {ROLES_ALLOWED}"),
        ("pin_roles", "system user", f"pin_roles must be {ROLES_ALLOWED}"),
        ("pin_roles", ["system", 1], f"pin_roles must be {ROLES_ALLOWED}"),
        ("pin_roles", 1, f"pin_roles must be {ROLES_ALLOWED}"),
        *(("heads", value, f"heads must be {HEADS}") for value in BAD_HEADS),
        *(("memory", value, f"memory must be {SIZES}") for value in BAD_SIZES),
        ("seed", "x", "seed must be a whole number, 0 or more"),
        ("max_tokens", "0", "max_tokens must be a whole number, 1 or more"),
    ],
)
def test_a_bad_value_is_told_its_origin_and_its_limits(name: str, value: object, limits: str):
    with pytest.raises(SettingError) as error:
        Settings.resolve({name: value})
    assert str(error.value) == f"--{name.replace('_', '-')}={value}: {limits}"


def test_a_bad_value_names_the_variable_or_the_file_it_stands_in(toml: Callable[[str], Path]):
    with pytest.raises(
        SettingError, match=r"^SP_KEEP_PCT=abc in the environment: keep must be a number from 0"
    ):
        Settings.resolve(environ={"SP_KEEP_PCT": "abc"})
    with pytest.raises(SettingError, match=r"^chunk=0 in .*settings\.toml: chunk must be a whole number, 1"):
        Settings.resolve(file=toml("chunk = 0"))
    with pytest.raises(SettingError, match=r"^keep=2.0: keep must be"):
        Settings(keep=2.0)


@pytest.mark.parametrize("window", [511, 8065])
def test_a_window_outside_its_clamps_is_refused_with_the_knob_that_widens_them(window: int):
    with pytest.raises(SettingError) as error:
        Settings.resolve(environ={"SP_WINDOW": str(window)})
    assert str(error.value) == (
        f"SP_WINDOW={window} in the environment: window must be 0 (automatic) or from 512 to 8064 tokens "
        "(spec_ctx - 128); for a larger one raise spec_ctx (SP_SPEC_CTX)"
    )


@pytest.mark.parametrize(("window", "spec_ctx"), [(512, 640), (512, 8192), (8064, 8192)])
def test_a_window_at_its_clamps_is_taken(window: int, spec_ctx: int):
    assert Settings(window=window, spec_ctx=spec_ctx).window == window


def test_an_unknown_knob_in_the_file_is_refused_with_the_nearest_name(toml: Callable[[str], Path]):
    with pytest.raises(SettingError, match=r"^chunks in .*\.toml is not a setting; did you mean chunk\?$"):
        Settings.resolve(file=toml("chunks = 8"))
    with pytest.raises(SettingError, match=r"^qqq in .* is not a setting; known are enabled, .*max_tokens$"):
        Settings.resolve(file=toml("qqq = 8"))


def test_an_unknown_flag_is_refused_with_the_nearest_name():
    with pytest.raises(SettingError, match=r"^kep in the flags is not a setting; did you mean keep\?$"):
        Settings.resolve({"kep": 0.3})


def test_an_unknown_variable_only_warns_because_others_may_use_the_prefix(caplog: pytest.LogCaptureFixture):
    settings = Settings.resolve(environ={"SP_KEEP": "0.5", "SP_QQQQQQQ": "1", "PATH": "x"})
    assert settings == Settings()
    assert caplog.messages == [
        "SP_KEEP is not a setting and has no effect; did you mean SP_MAX_KEEP?",
        "SP_QQQQQQQ is not a setting and has no effect",
    ]


def test_a_missing_or_broken_file_is_named(tmp_path: Path, toml: Callable[[str], Path]):
    with pytest.raises(FileMissing, match=r"settings file .*none\.toml cannot be read: No such file"):
        Settings.resolve(file=tmp_path / "none.toml")
    with pytest.raises(FileMissing, match=r"cannot be read: Is a directory"):
        Settings.resolve(file=tmp_path)
    with pytest.raises(SettingError, match=r"settings file .*settings\.toml is not TOML: "):
        Settings.resolve(file=toml("chunk ="))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"break_even": False, "spec_throughput": 600},
            "--spec-throughput=600.0 has no effect: break_even is off",
        ),
        (
            {"break_even": False, "break_even_safety": "1.5"},
            "--break-even-safety=1.5 has no effect: break_even is off",
        ),
        ({"keep": 0.3, "select_mode": "mass"}, "--keep=0.3 has no effect: selection is by mass"),
        (
            {"keep": 0.3, "cumulative_mass": 0.9},
            "--cumulative-mass=0.9 has no effect: selection is by a fixed fraction",
        ),
    ],
)
def test_a_knob_that_cannot_act_says_so(
    flags: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
):
    Settings.resolve(flags)
    assert caplog.messages == [message]


def test_knobs_that_act_are_silent(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    Settings.resolve({"keep": 0.3, "window": 2000})
    Settings.resolve({"keep": 1.0, "select_mode": "mass"})  # keep=1 acts in both modes: it keeps all
    Settings.resolve({"cumulative_mass": 0.9})
    Settings.resolve({"break_even": True, "spec_throughput": 600, "break_even_safety": 1.5})
    Settings.resolve({"break_even": False})
    assert not caplog.messages


def test_settings_can_be_changed_one_knob_at_a_time_and_compared():
    base = Settings()
    changed = dataclasses.replace(base, keep=0.5)
    assert changed.selection == "chunk"
    assert changed != base
    assert changed == Settings(keep=0.5)
    assert hash(changed) == hash(Settings(keep=0.5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.keep = 0.1  # pyright: ignore[reportAttributeAccessIssue]


# --- values that stand in for defaults

CHOSEN = {"heads": ["0.1", "1.2"], "lookahead": 0, "pool": 7, "keep": 0.15}


def test_settings_left_at_their_defaults_take_the_values_that_stand_in_for_them():
    filled = Settings(max_tokens=5).with_defaults(CHOSEN)
    assert filled.heads == (Head(0, 1), Head(1, 2))
    assert (filled.lookahead, filled.pool, filled.keep, filled.max_tokens) == (0, 7, 0.15, 5)
    assert filled.selection == "chunk"


def test_what_is_given_is_not_replaced_even_if_it_is_the_default():
    assert Settings(pool=5).with_defaults(CHOSEN).pool == 5
    assert Settings.resolve({"pool": "13"}).with_defaults(CHOSEN).pool == 13


@pytest.mark.parametrize("said", [{"keep": 0.5}, {"select_mode": "mass"}, {"cumulative_mass": 0.7}])
def test_how_much_to_keep_is_the_callers_once_they_say_anything_about_it(said: dict[str, object]):
    filled = Settings.resolve(said).with_defaults(CHOSEN)
    assert filled.keep == said.get("keep")
    assert filled.lookahead == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [({"pool": 12}, "pool=12 in the calibration"), ({"pol": 13}, "pol in the calibration is not a setting")],
)
def test_values_that_are_no_settings_are_refused(values: dict[str, object], message: str):
    with pytest.raises(SettingError, match=message):
        Settings().with_defaults(values)
