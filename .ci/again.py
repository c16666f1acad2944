"""Try the few tests that failed beside others once more, alone, and say which were unsteady.

A test of real processes can fail on a busy machine for want of time. One that passes alone does not
end `make test`, but is named, with what it said: it is a defect, of itself or of the product. More
than two failures, errors of a fixture and anything that ended the run early are never tried again.

    python .ci/again.py build/tests.xml     # that `pytest --junitxml` wrote
"""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

MOST = 2
NOTES = Path("build/unsteady.txt")


def main() -> int:
    """Exit with 0 if what failed passes now."""
    report = Path(sys.argv[1])
    root = ElementTree.parse(report).getroot()
    report.unlink()  # it is of this run alone
    failures = [each for each in root.iter("testcase") if each.find("failure") is not None]
    if root.find(".//error") is not None or not 0 < len(failures) <= MOST:
        return 1
    names = [f"{each.get('classname')}::{each.get('name')}" for each in failures]
    print(f"== once more, alone: {', '.join(names)}", flush=True)
    # Without -n: nothing runs beside them.
    again = [sys.executable, "-m", "pytest", "-q", "-m", "", "--last-failed"]
    if subprocess.run([*again, "--last-failed-no-failures", "none"], check=False).returncode:
        return 1
    for name, case in zip(names, failures, strict=True):
        said = case.find("failure")
        line = f"UNSTEADY: {name}: {said.get('message') if said is not None else ''}"
        print(line)
        with NOTES.open("a") as notes:
            notes.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
