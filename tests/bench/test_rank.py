"""The two forms of one user's request, which bench/rank measures against each other."""

import numpy as np
import pytest

from bench.rank.dense import Case, cases
from bench.rank.served import Arrays, Model


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_both_forms_have_the_same_bags(case: Case) -> None:
    model = Model(case)
    (request, other, *_) = model.requests(5)
    whole, once = model.whole(request), model.once(request)
    assert not np.array_equal(once["KEYS"], model.once(other)["KEYS"])
    users = dict(zip(model.context, bags_of(once, "CONTEXT_"), strict=True))
    names = [name for name in model.features if name not in users]
    candidates = iter(bags_of(once))
    repeated = [
        users[name] if name in users else next(candidates)
        for _ in range(5)
        for name in model.features
    ]
    assert bags_of(whole) == repeated
    assert len(names) * 5 == once["KEYS"].size
    assert once["CANDIDATES"].tolist() == [[5]]


def bags_of(arrays: Arrays, prefix: str = "") -> list[list[int]]:
    keys = arrays[f"{prefix}KEYS"].ravel()
    if f"{prefix}LENGTHS" not in arrays:
        return [[key] for key in keys.tolist()]
    ends = np.cumsum(arrays[f"{prefix}LENGTHS"].ravel())
    return [part.tolist() for part in np.split(keys, ends[:-1])]
