"""The counts of bench.house, over a tree of a few files."""

from pathlib import Path

from bench.house import count


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_tree_is_counted_by_folder_and_by_what_is_largest(tmp_path: Path) -> None:
    for folder in ("server", "trainer", "library", "bench"):
        write(tmp_path / folder / "a.py", "class A:\n    def f(self, x, *, y):\n        return x\n")
    write(tmp_path / "trainer" / "run" / "b.py", "B = 1\n")
    write(tmp_path / "trainer" / "__init__.py", "")
    for folder in ("node", "store"):
        write(tmp_path / "backend_cpp" / folder / "c.h", "class C {\n  friend class D;\n};\n")
        write(tmp_path / "backend_cpp" / folder / "c_test.cc", "// a test\n")
    write(tmp_path / "docs" / "page.md", "# Page\n\nText.\n")
    tasks = "# Extend\n\n## A source\n\nText.\n\n## A policy\n\n| file | what |\n|---|---|\n"
    tasks += "| [a.h](../a.h) | x |\n| [b.cc](../b.cc), `K` | y |\n| [b.cc](../b.cc), `M` | z |\n"
    write(tmp_path / "docs" / "extending.md", tasks)
    names = 'from x import A\n\n__all__ = [\n    "A",\n    "B",\n]\n'
    write(tmp_path / "library" / "client" / "__init__.py", names)
    write(tmp_path / "library" / "_common" / "__init__.py", names)
    ways = "# All\n\n## A bucket's move\n\n[a](../a.h), [b](../b.py), [a](../a.h), [p](p.md)\n"
    write(tmp_path / "docs" / "ARCHITECTURE.md", ways)
    counted = count(tmp_path)
    assert counted["server", "lines"] == 3
    assert counted["trainer", "lines"] == 4
    assert counted["backend_cpp", "lines"] == 6
    assert counted["backend_cpp, its tests", "lines"] == 2
    assert counted["docs", "lines"] == 3 + 13 + 5
    assert counted["product and benchmarks", "lines"] == 3 + 4 + (3 + 6 + 6) + 3 + 6
    assert counted["server", "largest class"] == 3
    assert counted["server", "most parameters of a function"] == 3
    assert counted["backend_cpp/node", "friends"] == 1
    assert counted["trainer", "rooms at its root"] == 2  # a.py and run/
    assert counted["library", "public names"] == 2
    assert counted["a move", "files on its way"] == 2
    assert counted["a source", "files changed"] == 0
    assert counted["a policy", "files changed"] == 2
