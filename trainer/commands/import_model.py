"""`import`: turn tables that exist already, and maybe a dense net, into a snapshot."""

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import rich.progress
import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import ProgressText, print_json, progress_bar, say
from embertide.trainer.publish.importer.hps import HpsModel, load_hps
from embertide.trainer.publish.importer.model import ImportOptions, ImportReport, import_model
from embertide.trainer.publish.importer.sources import ModelImportError
from embertide.trainer.publish.importer.spec import ModelSpec, load_spec, parse_table


def _spec(
    output: Path,
    model_file: Path | None,
    table: list[str],
    state_dict: Path | None,
    dtype: str | None,
) -> ModelSpec:
    if model_file is None:
        parsed = [parse_table(each, state_dict=state_dict, dtype=dtype or "fp32") for each in table]
        return ModelSpec(
            name=output.name,
            tables=tuple(spec for spec, _ in parsed),
            features=tuple(feature for _, features in parsed for feature in features),
        )
    given = {"--table": table, "--state-dict": state_dict, "--dtype": dtype}
    for option, value in given.items():
        if value:
            raise ModelImportError(option, f"goes into {model_file} when --model-file is given")
    return load_spec(model_file)


def _hps(
    path: Path, model: str | None, dtype: str | None, others: Mapping[str, object]
) -> HpsModel:
    for option, value in others.items():
        if value:
            raise ModelImportError(option, f"does not go with --hps: {path} names the tables")
    return load_hps(path, model, dtype or "fp32")


def _import(spec: ModelSpec, output: Path, options: ImportOptions) -> ImportReport:
    bar = progress_bar(
        ProgressText("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    tasks: dict[str, Any] = {}

    def progress(name: str, done: int, total: int) -> None:
        if name not in tasks:
            tasks[name] = bar.add_task(name, total=total)
        bar.update(tasks[name], completed=done)

    with bar:
        return import_model(spec, output, options, progress)


def _unread(path: Path, hps: HpsModel) -> None:
    if hps.unread:
        unread = ", ".join(hps.unread)
        say(f"{path}: not read, for nodes have flags of their own: {unread}", err=True)
    if hps.dense:
        say(f"{path}: its dense net is not read; a program that called HPS can go on", err=True)


def _serving(output: Path, *, ranking: bool, hps: bool) -> list[str]:
    kind = [] if ranking else ["--kind", "lookup"]
    return ["serve", str(output), *kind, *(["--hps-names"] if hps else [])]


def _serve(words: Sequence[str]) -> None:
    """Become `embertide serve`."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "embertide.server.cli", *words])


def _print(report: ImportReport) -> None:
    for table in report.tables:
        left_out = f", {table.duplicates:,} duplicates left out" if table.duplicates else ""
        say(
            f"{table.name}: {table.rows:,} rows of {table.dim} {table.dtype} in "
            f"{table.buckets:,} buckets{left_out}"
        )
    dense = f"dense net {report.dense_id}" if report.dense_id else "no dense net (lookup only)"
    say(
        f"{report.path}: model {report.model!r} at version {report.version}, {dense}, "
        f"{report.bytes:,} bytes in {report.seconds:.1f} s"
    )


def command(
    output: Annotated[Path, typer.Argument(help="The snapshot's folder; it must not exist.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- OPTIONS]", help="With --serve: options of `embertide serve`, behind --."
        ),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SOURCE",
            help="Once a table; :FEATURE or :FEATURE/POOLING may follow, once a feature. SOURCE: a "
            "folder with keys.npy and vectors.npy; KEYS.npy,VECTORS.npy; a .safetensors file with "
            "keys and vectors; an HPS folder with key and emb_vector; or, with --state-dict, a "
            "parameter.",
        ),
    ] = None,
    model_file: Annotated[
        Path | None,
        typer.Option(help="TOML or JSON with tables and features, instead of --table."),
    ] = None,
    hps: Annotated[
        Path | None,
        typer.Option(
            "--hps",
            metavar="PS_JSON",
            help="The ps.json of HugeCTR's HPS, which names a model's tables and their folders, "
            "instead of --table; of several models, --model chooses one.",
        ),
    ] = None,
    state_dict: Annotated[
        Path | None,
        typer.Option(help="A torch state_dict whose parameters are the tables; row index = key."),
    ] = None,
    dense: Annotated[
        Path | None, typer.Option(help="The folder that export-dense wrote, for ranking.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model's name; by default that of the file or folder.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="How --table's rows are stored: fp32 (default), fp16, bf16, int8 or int4."
        ),
    ] = None,
    duplicates: Annotated[
        str, typer.Option(help="When a key repeats: error, or last to keep the last row.")
    ] = "error",
    version: Annotated[int, typer.Option(help="The snapshot's version, 1 or more.")] = 1,
    watermark_ms: Annotated[
        int, typer.Option(help="Event time up to which the model has learned; 0: not known.")
    ] = 0,
    memory_mib: Annotated[int, typer.Option(help="Memory to use for rows, in MiB.")] = 512,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve it at once, as `embertide serve` does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Turn an existing model into a snapshot that serves without trainer or Redis.

    Rows are streamed, so tables may be far larger than memory; each lies once on disk beside the
    output meanwhile. The snapshot appears whole or not at all.

    Example, two tables of which items serve two features, for lookup:

        embertide import --table user=data/user --table item=data/item:cand:seen/mean snapshots/rank

    The same with a dense net, for ranking: write the net with export-dense, then add
    --dense nets/rank. From a torch model: --state-dict model.pt --table item=item_emb.weight

    A model of HPS, served to the clients that it had:

        embertide import --hps ps.json snapshots/wdl --serve -- --ddr-mib 8192
    """
    with report_errors(as_json):
        if options and not serve:
            raise ModelImportError(options[0], "is for --serve: give that, too, or leave it out")
        following = _serving(output, ranking=dense is not None, hps=hps is not None)
        if serve and output.exists():
            told = shlex.join(["embertide", *following])
            raise ModelImportError(output, f"exists: `{told}` serves it; or give another output")
        of_hps = None
        if hps is None:
            spec = _spec(output, model_file, table or [], state_dict, dtype)
        else:
            others = {"--table": table, "--model-file": model_file, "--state-dict": state_dict}
            of_hps = _hps(hps, model, dtype, {**others, "--dense": dense})
            spec = of_hps.spec
        if model is not None:
            spec = dataclasses.replace(spec, name=model)
        chosen: Any = duplicates  # checked by ImportOptions
        how = ImportOptions(
            version=version,
            watermark_ms=watermark_ms,
            memory_bytes=memory_mib << 20,
            duplicates=chosen,
            dense=dense,
        )
        report = _import(spec, output, how)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        _print(report)
        if hps is not None and of_hps is not None:
            _unread(hps, of_hps)
        if not serve:
            say(f"next: {shlex.join(['embertide', *following])}")
    if serve:
        _serve([*following, *(options or ())])
