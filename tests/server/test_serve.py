"""The work of `embertide serve` before Triton starts, and its checks while it runs."""

import errno
import functools
import itertools
import types
from pathlib import Path
from typing import Any

import pytest

from embertide.server.adapters import triton
from embertide.server.adapters.process import ProcessError
from embertide.server.adapters.schema import model_of
from embertide.server.cli import schema_switch
from embertide.server.cli.metrics_page import MetricsPage
from embertide.server.cli.mirror import Mirror
from embertide.server.cli.serve import context_columns, precision, without_password


def test_a_password_goes_to_a_file_that_we_alone_can_read(tmp_path: Path) -> None:
    for url, user, rest in (
        ("redis://me:p%40ss@host:6380/2", "me@", "host:6380/2?"),
        ("redis://:p%40ss@host", "", "host?"),
        ("rediss://me:p%40ss@host?ssl_ca_certs=/ca", "me@", "host?ssl_ca_certs=/ca&"),
    ):
        path = tmp_path / "bus.password"
        scheme = url.partition("://")[0]
        want = f"{scheme}://{user}{rest}password_file={path}"
        assert without_password("bus", url, tmp_path) == want
        assert path.read_text() == "p@ss"
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_url_without_a_password_stays_as_it_is(tmp_path: Path) -> None:
    for url in (None, "redis://host:6379/0", "redis://me@host?password_file=/p", "unix:///run/r"):
        assert without_password("state", url, tmp_path) == url
    assert not list(tmp_path.iterdir())


def test_a_password_in_the_query_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match=r"--bus has a password.*password_file=PATH") as caught:
        without_password("bus", "redis://host?username=u&password=hush", tmp_path)
    assert "hush" not in str(caught.value)


def snapshot(publication: Path, name: str, schema: int) -> Path:
    path = publication / "snapshots" / name
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(f'{{"schema_id": {schema}}}')
    return path


def watch(
    publication: Path, *, own_context: bool = False, **options: Any
) -> tuple[schema_switch.SchemaSwitch, list[str]]:
    """Watch for a server of which only the metrics are asked."""
    page = (
        'embertide_schema{model="news",schema="1"} 1\nembertide_promoted_version{model="news"} 4\n'
    )
    server: Any = types.SimpleNamespace(restarts=0, metrics=lambda: page)  # to load fails
    said: list[str] = []
    given = triton.ModelOptions(publication=publication, **options)
    switch = schema_switch.SchemaSwitch(server, "news", given, said.append, own_context=own_context)
    return switch, said


def test_nodes_that_share_a_model_say_once_what_to_do_instead(tmp_path: Path) -> None:
    snapshot(tmp_path, "000000000004-000001", 1)
    switch, said = watch(tmp_path, state="redis://host", peer_address="host:1")
    switch.poll()
    assert not said
    snapshot(tmp_path, "000000000005-000001", 2)
    for _ in range(3):
        switch.poll()
    assert len(said) == 1
    assert "with another --state" in said[0]


def test_a_node_with_a_guard_waits_for_its_decision(tmp_path: Path) -> None:
    switch, said = watch(tmp_path, guard="on")
    snapshot(tmp_path, "000000000005-000001", 2)
    switch.poll()
    assert "until version 5 is promoted" in said[0]


def test_the_newest_snapshot_is_of_the_latest_lineage(tmp_path: Path) -> None:
    switch, said = watch(tmp_path)
    snapshot(tmp_path, "000000000009-000001", 2)
    snapshot(tmp_path, "000000000005-000002", 1)
    switch.poll()
    assert not said


def test_a_manifest_that_cannot_be_read_is_tried_again_later(tmp_path: Path) -> None:
    switch, said = watch(tmp_path)
    (snapshot(tmp_path, "000000000005-000001", 2) / "manifest.json").write_text("{")
    for _ in range(3):
        switch.poll()
    assert len(said) == 1
    assert "schema 1 goes on; tried again in 5 s" in said[0]


def test_each_schema_has_an_ssd_folder_of_its_own(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    (ssd / "device-0.log").touch()
    (ssd / "theirs.1").mkdir()
    folders = schema_switch.SsdFolders(ssd)
    first = folders.first("7")
    assert (first / "device-0.log").is_file()
    assert folders.first("7") == first
    other = folders.new("8")
    other.mkdir()
    again = folders.new("7")  # while the first one is in use
    assert len({first, other, again}) == 3
    again.mkdir()
    assert folders.first("7") == again
    folders.keep(again)
    assert sorted(ssd.iterdir()) == sorted([again, ssd / "theirs.1"])


def test_a_full_drive_in_a_switch_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, said = watch(tmp_path)
    snapshot(tmp_path, "000000000005-000001", 2)
    now, tried = [1000.0], []

    def write(*_: object) -> None:
        tried.append(now[0])
        raise OSError(errno.ENOSPC, "No space left on device", f"{tmp_path}/config.pbtxt")

    server: Any = switch._server
    server.options = types.SimpleNamespace(repository=tmp_path)
    monkeypatch.setattr(triton, "write_model", write)
    monkeypatch.setattr("embertide.server.cli.schema_switch.time.monotonic", lambda: now[0])
    for _ in range(60):
        switch.poll()  # before: OSError, which ended the node
        now[0] += 0.5
    assert [line for line in said if f"{tmp_path}/config.pbtxt: No space left on device" in line]
    assert len(tried) >= 3
    assert max(b - a for a, b in itertools.pairwise(tried)) <= 10  # of room it hears that soon


def test_a_model_has_the_name_that_its_manifest_says(tmp_path: Path) -> None:
    path = snapshot(tmp_path, "000000000005-000001", 2)
    (path / "manifest.json").write_text('{"model": "clicks-2"}')
    assert model_of(path) == "clicks-2"
    for wrong in ('{"model": "a/../b"}', '{"model": "a\\nb"}', "{}", '{"model": 7, "x": '):
        (path / "manifest.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"is no name|Expecting value"):
            model_of(path)


@pytest.mark.parametrize(
    ("said", "url", "refused"),
    [
        ('{"storage": "s3://a/x"}', "s3://b/x", True),
        ('{"storage": "s3://a/x"}', "s3://a/x/", False),
        ('{"storage": ""}', "s3://b/x", False),
        ("[" * 100, "s3://b/x", False),
    ],
)
def test_a_directory_serves_one_url(tmp_path: Path, said: str, url: str, refused: bool) -> None:
    (tmp_path / "publication").mkdir()
    (tmp_path / "publication" / "origin.json").write_text(said)
    mirror = functools.partial(Mirror, url, tmp_path / "publication", log=tmp_path / "log")
    if refused:
        with pytest.raises(ProcessError, match=f"has s3://a/x, and is to have {url}"):
            mirror()
        assert not (tmp_path / "log").exists()
    else:
        mirror().stop()


@pytest.mark.parametrize(
    ("taken", "results", "says"),
    [
        (1, {"taken": 1, "refused": 1, "no_cpu": 0}, "in int8"),
        (0, {"taken": 1, "refused": 1, "no_cpu": 0}, "in fp32: int8 is not taken"),
        (
            0,
            {"taken": 0, "refused": 0, "no_cpu": 2},
            "in fp32: this CPU lacks the instructions for int8",
        ),
    ],
)
def test_what_the_dense_net_is_computed_in_is_said(
    taken: int, results: dict[str, int], says: str
) -> None:
    lines = [f'embertide_dense_reduced{{model="news",type="int8"}} {taken}']
    family = "embertide_dense_reduced_versions_total"
    lines += [
        f'{family}{{model="news",type="int8",result="{result}"}} {count}'
        for result, count in results.items()
    ]
    page = MetricsPage("\n".join(lines) + "\n")
    assert says in str(precision(page, "news"))
    assert precision(page, "other") is None  # its run chose no reduced precision


def test_the_columns_of_contexts_are_those_of_the_snapshot_unless_others_are_given(
    tmp_path: Path,
) -> None:
    path = snapshot(tmp_path, "000000000004-000001", 1)
    flags = {"kind": "ranking", "context": []}
    assert context_columns(tmp_path, flags) == ()  # of a build that did not write them
    (path / "manifest.json").write_text('{"schema_id": 1, "context": ["user", "age"]}')
    assert context_columns(tmp_path, flags) == ("user", "age")
    assert context_columns(path, flags) == ("user", "age")
    assert context_columns(tmp_path, flags | {"context": ["user"]}) == ("user",)
    assert context_columns(tmp_path, flags | {"kind": "lookup"}) == ()
    assert context_columns(tmp_path / "none", flags) == ()


@pytest.mark.parametrize(
    ("own", "kind", "loaded"),
    [(False, "ranking", ("age",)), (True, "ranking", ("user",)), (False, "lookup", ())],
)
def test_another_schema_brings_its_own_columns_of_contexts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: bool,
    kind: str,
    loaded: tuple[str, ...],
) -> None:
    context = ("user",) if kind == "ranking" else ()
    switch, _ = watch(tmp_path, own_context=own, kind=kind, context=context)
    newest = snapshot(tmp_path, "000000000005-000001", 2)
    (newest / "manifest.json").write_text('{"schema_id": 2, "context": ["age"]}')
    server: Any = switch._server
    server.options = types.SimpleNamespace(repository=tmp_path)
    server.load = lambda name: types.SimpleNamespace(done=lambda: False)
    written: list[triton.ModelOptions] = []
    monkeypatch.setattr(triton, "write_model", lambda *given: written.append(given[2]))
    switch.poll()
    assert [tuple(options.context) for options in written] == [loaded]
