"""The flags of `serve` and a model's parameters, both made of what options.proto declares."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from embertide.server.adapters.node_options import OPTIONS, ModelOptions
from embertide.server.adapters.process import UsageError
from embertide.server.adapters.triton import model_config
from embertide.server.cli.node_flags import FLAGS, options_of, with_node_flags

# The options of a node alone that is given nothing: `serve` writes them though they are a node's
# defaults too.
ALONE = {
    "kind": "ranking",
    "threads": 1,
    "devices": 1,
    "numa_nodes": "auto",
    "ddr_budget_bytes": 1 << 30,
    "ssd_budget_bytes": 0,
    "index": "plain",
    "ssd_engine": "auto",
    "node": "node-0",
}


def given(*words: str) -> dict[str, Any]:
    """The values of flags for a command line."""
    found: dict[str, Any] = {}
    app = typer.Typer()

    @app.command()
    @with_node_flags
    def command(place: str, *, flags: dict[str, Any]) -> None:
        found.update(flags)

    done = CliRunner().invoke(app, ["here", *words])
    assert done.exit_code == 0, done.output
    return found


def written(*words: str, **known: Any) -> dict[str, Any]:
    options = options_of(given(*words), **known)
    texts = {name: OPTIONS[name].text(each) for name, each in options.items()}
    return {name: options[name] for name, text in texts.items() if text is not None}


def test_a_command_line_without_flags_says_what_serve_does() -> None:
    assert written() == ALONE
    assert {flag.name: flag.default for flag in FLAGS.values() if flag.name == "ddr_mib"} == {
        "ddr_mib": 1 << 30
    }


def test_flags_have_units_of_their_own() -> None:
    words = "--ddr-mib 3 --ssd-mib 1 --ssd-seal-s 2.5 --table-budget a=1 --table-budget b=2"
    assert written(*words.split()) == {
        **ALONE,
        "ddr_budget_bytes": 3 << 20,
        "ssd_budget_bytes": 1 << 20,
        "ssd_seal_interval_ms": 2500,
        "table_budgets": ("a=1", "b=2"),
    }


def test_an_option_that_has_no_effect_is_left_out() -> None:
    alone = "--group 3 --tls certs --plaintext --hbm-devices 2 --guard-timeout-s 9 --join-rest 2"
    assert written(*alone.split()) == ALONE
    shared = written(*alone.split(), "--guard", state="redis://h", peer_address="h:1")
    assert shared["group"] == 3
    assert shared["tls_folder"] == Path("certs")
    assert shared["plaintext"] is True
    assert shared["guard_timeout_ms"] == 9000
    assert shared["hot_rows_bytes"] == 32 << 20
    assert "hbm_devices" not in shared


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--kind rank", "kind is 'rank'; use ranking or lookup"),
        ("--hbm-kind cpu", "hbm_kind is 'cpu'; use gpu or twin"),
        ("--ssd-engine uring", "ssd_engine is 'uring'; use auto, io_uring, libaio or pread"),
    ],
)
def test_a_value_that_is_no_choice_is_refused(words: str, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        options_of(given(*words.split()))


def test_parameters_are_texts_in_the_order_of_their_declaration() -> None:
    options = ModelOptions(
        node="n", snapshot=Path("/s"), guard=True, plaintext=False, table_budgets=("a=1", "b=2")
    )
    assert list(options.parameters().items()) == [
        ("kind", "lookup"),
        ("snapshot", "/s"),
        ("table_budgets", "a=1,b=2"),
        ("node", "n"),
        ("guard", "on"),
    ]
    assert options.replace(node=None, instances=3).parameters().keys() == {
        *("kind", "snapshot", "table_budgets", "guard"),
    }
    assert (options.bus, options.node, options.instances) == (None, "n", 1)


def test_inputs_of_contexts_are_declared_where_their_columns_are_named() -> None:
    options = written("--context", "user", "--context", "age")
    assert options["context"] == ("user", "age")
    told = model_config("m", ModelOptions(snapshot=Path("/s"), **options))
    assert 'key: "context" value: { string_value: "user,age" }' in told
    inputs = re.findall(r'input \[ { name: "(\w+)"', told)
    of_contexts = ["CONTEXT_KEYS", "CONTEXT_LENGTHS", "CONTEXT_WEIGHTS", "CONTEXT_DENSE"]
    assert inputs == ["KEYS", "LENGTHS", "WEIGHTS", "DENSE", *of_contexts, "CANDIDATES"]
    assert "CONTEXT" not in model_config("m", ModelOptions(kind="ranking", snapshot=Path("/s")))
    with pytest.raises(ValueError, match="context goes with kind ranking"):
        ModelOptions(context=("user",))


def test_a_name_that_no_option_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="no option 'devises'; did you mean devices"):
        ModelOptions(devises=1)
    with pytest.raises(AttributeError, match="has no 'devises'"):
        _ = ModelOptions().devises


def test_flags_are_told_apart() -> None:
    names = [each.setting.flag.name for each in OPTIONS.values() if each.setting.HasField("flag")]
    assert len(set(names)) == len(names) == len(FLAGS)
