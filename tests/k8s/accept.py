"""Takes a cluster through all that docs/kubernetes.md says: tests/k8s/accept.py --kubeconfig F.

The cluster needs the images of k8s/images under the names of the manifests, and a default storage
class that offers ReadWriteMany; one machine does. A namespace is made and deleted at the end.
Certificates are made here, so cert-manager is not needed. About twenty minutes.
"""

import dataclasses
import datetime
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import rich.console
import rich.table
import typer

sys.path.insert(1, str(Path(__file__).parents[2]))  # for `bench`

from acceptance.deployment import Deployment, Storage
from acceptance.site import Finding, Site
from acceptance.steps import STEPS, WITH_STORAGE

from bench import report
from bench.cluster import Cluster, RefusedError

ROOT = Path(__file__).resolve().parents[2]


def claims(findings: Iterable[Finding]) -> list[report.Row]:
    """The findings as rows of a benchmark, each held or not."""
    return [
        report.measure(
            (each.step, each.what, "held"),
            [float(each.holds)],
            better="higher",
            target=1,
            claim="B.5",
        )
        for each in findings
        if each.bar
    ]


def show(site: Site) -> None:
    """Print the report."""
    table = rich.table.Table("", "step", "what", "found", "bar")
    for each in site.findings:
        mark = "ok" if each.holds else "[red]FAIL[/red]"
        table.add_row(mark, each.step, each.what, each.value, each.bar)
    rich.console.Console().print(table)


def main(
    kubeconfig: Annotated[
        str, typer.Option(envvar="EMBERTIDE_KUBECONFIG", help="An administrator's kubeconfig.")
    ],
    namespace: Annotated[
        str, typer.Option(help="Made, and deleted at the end.")
    ] = "embertide-acceptance",
    steps: Annotated[str, typer.Option(help="Some of: " + ",".join(STEPS))] = ",".join(STEPS),
    storage: Annotated[
        str,
        typer.Option(help="The publication is there: s3://BUCKET/PREFIX, still empty."),
    ] = "",
    storage_options: Annotated[
        Path | None, typer.Option(help="Of --storage: a folder with a file for each option.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The report as JSON.")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the namespace, or go on in one that was left.")
    ] = False,
) -> None:
    """Take a cluster through all that docs/kubernetes.md says, and report."""
    chosen = steps.split(",")
    if unknown := [each for each in chosen if each not in STEPS]:
        raise typer.BadParameter(f"no step {unknown}: choose of {', '.join(STEPS)}")
    if not Path(kubeconfig).is_file():
        raise typer.BadParameter(f"no file {kubeconfig!r}: name your cluster's (KUBECONFIG=FILE)")
    if storage and (storage_options is None or not storage_options.is_dir()):
        raise typer.BadParameter(f"--storage-options: no folder {storage_options}")
    objects = Storage(storage, storage_options) if storage and storage_options else None
    if objects is not None:
        chosen = [each for each in chosen if each in WITH_STORAGE]
    cluster = Cluster(kubeconfig, namespace)
    try:
        version = json.loads(cluster.run("version", "-o", "json"))["serverVersion"]["gitVersion"]
        if not keep and cluster.allows("get", "namespace", namespace):
            raise RefusedError(f"there is a namespace {namespace}: delete it, or name another")
    except RefusedError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    place = Path(tempfile.gettempdir()) / f"acceptance-{namespace}"
    again = keep and place.exists()
    if not again:
        cluster.run("create", "namespace", namespace)
        cluster.run(
            "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted"
        )
        shutil.rmtree(place, ignore_errors=True)  # of a run that was ended
        place.mkdir(mode=0o700)
    console = rich.console.Console(highlight=False)
    site = Site(
        cluster,
        Deployment.left(place, objects) if again else Deployment.make(place, objects),
        console.print,
    )
    try:
        if again:
            site.follow()
        for each in chosen:
            STEPS[each](site)
    finally:
        site.close()
        show(site)
        told = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": report.commit(ROOT),
            "kubernetes": version,
            "machine": report.machine(),
            "steps": chosen,
            "findings": [dataclasses.asdict(each) for each in site.findings],
        }
        if out is not None:
            out.write_text(json.dumps(told, indent=1) + "\n")
        report.write(ROOT / "build" / "bench" / "accept.json", ROOT, claims(site.findings))
        if not keep:
            # First: a namespace is not looked at again for as long as its pods may take to end.
            cluster.allows("delete", "job", "--all", "--cascade=foreground", "--timeout=60s")
            cluster.allows("delete", "pods", "--all", "--grace-period=0", "--force")
            try:
                cluster.run("delete", "namespace", namespace, timeout_s=900)
            except RefusedError as error:
                console.print(f"the namespace {namespace} is still there: {error}")
            shutil.rmtree(place)
    failed = sum(not each.holds for each in site.findings)
    console.print(f"{len(site.findings) - failed} of {len(site.findings)} hold")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
