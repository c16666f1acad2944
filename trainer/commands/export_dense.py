"""`export-dense`: compile anybody's `nn.Module` into the dense part of a snapshot."""

from pathlib import Path
from typing import Annotated

import rich.progress
import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import ProgressText, print_json, progress_bar, say


def command(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="A function that makes the net.")
    ],
    output: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    embedding_dim: Annotated[
        int,
        typer.Option(help="Columns of embeddings: the features' dims, added up in their order."),
    ],
    dense_features: Annotated[int, typer.Option(help="Columns of dense; 0 if there is none.")] = 0,
    head: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a score, for a net that returns several per sample, [batch, heads]: "
            "given once for each, in their order."
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="A state_dict to load into the net, .pt or .safetensors."),
    ] = None,
    cpu: Annotated[
        str, typer.Option(help="The oldest CPU to run on: x86-64-v2, x86-64-v3 or x86-64-v4.")
    ] = "x86-64-v3",
    cache: Annotated[
        Path | None,
        typer.Option(help="A folder of compiled programs, to compile an unchanged net once."),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Also say what computing the user's columns once would gain, for one user and 256 "
            "candidates, and what of the net is in the way; with --cache, what was measured is "
            "kept there.",
        ),
    ] = False,
    context_embeddings: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BEGIN:END",
            help="With --explain: columns of embeddings that are the user's, as 0:640; given "
            "several times.",
        ),
    ] = None,
    context_dense: Annotated[
        list[str] | None,
        typer.Option(metavar="BEGIN:END", help="With --explain: columns of dense that are."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compile any nn.Module with forward(dense, embeddings) -> scores for serving.

    The net is tried on zeros, compiled (about half a minute), and the compiled scores are compared
    with its own. Its weights are inputs of the program, so one program serves every version.

    Example, nets.py in the working directory, whose make() gives a net of 2 dense features over
    embeddings of 8 + 8 + 4 values:

        embertide export-dense nets:make nets/rank --dense-features 2 --embedding-dim 20

    Then: embertide import --table ... --dense nets/rank snapshots/rank
    """
    from embertide.trainer.model import foreign  # torch takes seconds: not for --help
    from embertide.trainer.model.export import ExportError
    from embertide.trainer.model.rewrite import explain as explaining

    bar = progress_bar(
        rich.progress.SpinnerColumn(),
        ProgressText("{task.description}"),
        rich.progress.TimeElapsedColumn(),
    )
    with report_errors(as_json), bar:
        task = bar.add_task("loading the module", total=None)
        shape = foreign.DenseShape(
            dense_features=dense_features,
            embedding_dim=embedding_dim,
            cpu=cpu,
            heads=tuple(head or ()),
        )
        if explain:
            columns = dense_features, embedding_dim
            contexts = explaining.contexts_of(*columns, context_dense, context_embeddings)
        elif context_dense or context_embeddings:
            raise ExportError("columns of the context are for --explain; add it")
        module = foreign.load_module(target)
        unused = [] if weights is None else foreign.load_weights(module, weights)
        bar.update(task, description="compiling and comparing")
        facts = {"target": target, "unused_weights": unused}
        description = foreign.export_folder(module, output, shape, cache=cache, **facts)
        explanation = None
        if explain:
            bar.update(task, description="rewriting for contexts")
            explanation = explaining.explain(module, contexts, cache)
    if as_json:
        more = {} if explanation is None else {"contexts": explanation.facts()}
        print_json({"path": str(output), **description, **more})
        return
    if unused:
        say(f"not used from {weights}: {', '.join(unused)}")
    difference = description["max_difference"]
    compared = (
        f"scores within {difference:.1g} of the module's"
        if difference is not None
        else f"not compared with the module: this machine cannot run {cpu}"
    )
    say(f"{output}: {description['parameters']:,} parameters for {cpu}, {compared}")
    for line in () if explanation is None else explanation.lines():
        say(line)
