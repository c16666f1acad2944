"""docs/howto.md ("howto.md"): its seven tasks as `bench.tasks` reads and does them."""

import re
from pathlib import Path

import pytest

from bench.servers import BenchError
from bench.tasks import Step, Task, minutes, tasks
from embertide.server.adapters.process import free_ports

PAGE = (Path(__file__).parents[2] / "docs" / "howto.md").read_text()


def test_each_task_has_its_steps() -> None:
    found = tasks(PAGE)
    assert len(found) == 7
    for task in found:
        files = [step for step in task.steps if step.file]
        for step in files:
            compile(step.text, step.file, "exec")
        shell = [step.text for step in task.steps if not step.file]
        # Every file that is run has been saved, and every model that is asked is served.
        run = set(re.findall(r"python (\w+\.py)", "".join(shell)))
        assert run <= {step.file for step in files}
        assert any("embertide control" in text or "serve" in text for text in shell)


def test_python_without_a_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="Two: a block of Python without `Save this as`"):
        tasks("## One\n\nSave this as `a.py`.\n\n```python\n```\n\n## Two\n\n```python\n```\n")


def test_a_command_that_fails_fails_its_task() -> None:
    assert minutes(Task("works", steps=[Step("a.py", ""), Step("", "test -f a.py")])) < 1
    with pytest.raises(BenchError, match=r"exit status 1: test -f b\.py"):
        minutes(Task("does not", steps=[Step("a.py", ""), Step("", "test -f b.py\ntrue")]))


@pytest.mark.long
@pytest.mark.parametrize(
    "title", ["A TorchRec model", "A model of HPS", "Why an answer is what it is"]
)
def test_a_task_is_done_by_the_page_alone(title: str) -> None:
    grpc, metrics = free_ports(2)
    ports = f"--grpc-port {grpc} --metrics-port {metrics}"
    # Other ports than the page's, where a node of somebody else may be.
    page = re.sub(r"^(embertide serve .*)", rf"\1 {ports}", PAGE, flags=re.MULTILINE)
    page = page.replace(" --serve\n", f" --serve -- {ports}\n")
    page = page.replace("127.0.0.1:8001", f"127.0.0.1:{grpc}")
    page = page.replace(
        "embertide status\n", f"embertide status --url http://127.0.0.1:{metrics}/metrics\n"
    )
    (task,) = (each for each in tasks(page) if each.title == title)
    assert minutes(task) < 10
