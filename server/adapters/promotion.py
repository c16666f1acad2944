"""The promotion record as the bus has it (docs/formats.md): what was decided on versions."""

import json
import re

from embertide.server.core.news import Promotion, Rollback, Withdrawal

_HEADER = re.compile(rb"EMPRM001 (\d{1,19}) ([0-9a-f]{8})\n")


def read_promotion(data: bytes) -> Promotion:
    """Return a record by its bytes. Its checksum is for files: Redis keeps whole values.

    Raises:
        ValueError: The bytes are something else.
    """
    header = _HEADER.match(data)
    if header is None:
        raise ValueError("a promotion record begins with EMPRM001, a revision and a checksum")
    fields = json.loads(data[header.end() :])
    try:
        return Promotion(
            promoted=int(fields["promoted"]),
            withdrawn=tuple(
                Withdrawal(
                    int(each["first"]),
                    int(each["last"]),
                    str(each["reason"]),
                    str(each["by"]),
                    int(each["at_ms"]),
                    str(each["detail"]),
                )
                for each in fields["withdrawn"]
            ),
            undone=tuple(
                Rollback(int(each["number"]), int(each["to"]), str(each["by"]), int(each["at_ms"]))
                for each in fields["undone"]
            ),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"a promotion record lacks {error}") from error
