"""docs/serving.md's table of parameters is what options.proto declares.

EMBERTIDE_REWRITE=1 writes the table anew; the difference is then reviewed.
"""

import os
from pathlib import Path

from embertide.server.adapters.node_options import MIB, OPTIONS, Option
from embertide.server.cli.node_flags import FLAGS
from embertide.v1 import options_pb2

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
HEAD = "| parameter | flag of `serve` | default | values | meaning |\n|---|---|---|---|---|\n"
END = "\n\nPaths are relative to the model's folder."
TEXTS = {
    options_pb2.FORMAT_NAME: "a name",
    options_pb2.FORMAT_ADDRESS: "HOST:PORT",
    options_pb2.FORMAT_ADDRESSES: "HOST:PORT,...",
    options_pb2.FORMAT_REDIS: "a URL",
}


def in_words(number: float, unit: int = options_pb2.UNIT_UNSPECIFIED) -> str:
    """A number as the page has it."""
    if unit == options_pb2.UNIT_BYTES and number:
        for size, name in ((1 << 50, "PiB"), (1 << 30, "GiB"), (MIB, "MiB")):
            if number % size == 0:
                return f"{number // size:,} {name}"
    return f"{number:,}" if number != int(number) or number < 2**63 else "2^64 - 1"


def default(option: Option) -> str:
    if option.setting.default_text:
        return option.setting.default_text
    if option.type is bool:
        return "on" if option.default else "off"
    if option.default is None:
        return "none"
    return option.default if option.type is str else in_words(option.default, option.setting.unit)


def values(option: Option) -> str:
    setting = option.setting
    if setting.choices:
        return ", ".join(f"`{each}`" for each in setting.choices)
    if option.type in (int, float):
        least, most = (in_words(each, setting.unit) for each in (setting.min, setting.max))
        return f"{least} to {most}"
    kinds: dict[type, str] = {bool: "`on`, `off`", Path: "a path", tuple: "a list"}
    return kinds.get(option.type) or TEXTS.get(setting.format, "text")


def flag(option: Option) -> str:
    """The flag, with its default where it is another than the parameter's."""
    name = option.setting.flag.name
    flags = [each for each in FLAGS.values() if each.option is option]
    others = [each.default for each in flags if each.default not in (None, option.default)]
    return " ".join([f"`--{name}`" if name else "", *(f"({each})" for each in others)]).strip()


def row(option: Option) -> str:
    setting = option.setting
    needs = f"Needs `{setting.needs}`." if setting.needs not in ("", option.name) else ""
    meaning = " ".join(filter(None, (setting.help, setting.more, needs)))
    cells = (f"`{option.name}`", flag(option), default(option), values(option), meaning)
    return f"| {' | '.join(cells)} |"


def test_the_table_is_what_is_declared() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(HEAD)
    _, end, after = rest.partition(END)
    assert end, "the table, or the line after it, has gone"
    written = before + HEAD + "\n".join(map(row, OPTIONS.values())) + END + after
    if os.environ.get("EMBERTIDE_REWRITE") == "1":
        PAGE.write_text(written)
    assert PAGE.read_text() == written, "EMBERTIDE_REWRITE=1 writes the table anew"


def test_each_option_says_all_that_is_needed() -> None:
    for name, option in OPTIONS.items():
        setting = option.setting
        assert setting.help.endswith("."), name
        assert (setting.unit == options_pb2.UNIT_MILLISECONDS) == name.endswith("_ms"), name
        assert (setting.unit == options_pb2.UNIT_BYTES) == ("_bytes" in name), name
        assert setting.HasField("max") == (option.type in (int, float)), name
        assert not setting.needs or setting.needs in OPTIONS, name
        if setting.choices and option.default is not None:
            assert option.default in setting.choices, name
