"""The report of bench.beside on the figures of two checkouts."""

from bench.beside import Figures, in_turn


def test_sides_are_measured_in_turn_and_the_first_time_for_nothing() -> None:
    asked: list[str] = []
    times = iter(range(100))

    def side(name: str, faster: float) -> Figures:
        asked.append(name)
        cold = 1000.0 if next(times) < 2 else 0.0
        rate = ("case", "rate", "1/s")
        return {rate: cold + 10.0 * faster, ("case", "p99", "us"): cold + 5.0 / faster}

    rate, p99 = in_turn((lambda: side("ours", 2), lambda: side("earlier", 1)), 5)
    assert asked == ["ours", "earlier"] * 6
    assert (rate.better, rate.ratio, rate.met) == ("higher", 2.0, True)
    assert (p99.better, p99.ratio, p99.met) == ("lower", 0.5, True)


def test_a_side_that_is_slower_than_allowed_misses() -> None:
    def side(rate: float) -> Figures:
        return {("case", "rate", "1/s"): rate, ("case", "CPU", "s"): 1 / rate}

    assert [row.met for row in in_turn((lambda: side(0.94), lambda: side(1.0)), 5)] == [False] * 2
