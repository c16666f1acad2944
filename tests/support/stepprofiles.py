"""Profiles of steps for tests: small, and of round numbers."""

from embertide.trainer.sync.placing.profile import (
    LayerProfile,
    Profile,
    RankProfile,
    TableProfile,
    WorkProfile,
)

LINK = RankProfile(bytes_per_s=1e6, latency_s=0.0, sum_bytes_per_s=1e6)
NO_WORK = WorkProfile(route_s=0, lookup_s=0, pool_s=0, give_s=0, update_s=0, adam_s=0)


def table(name: str, load_P: tuple[float, ...] = (1.0,), *, floats: int = 4) -> TableProfile:
    """Return a table of which a part of n events asks n keys."""
    return TableProfile(
        name=name,
        row_floats=floats,
        gradient_floats=floats,
        row_bytes=4 * floats,
        rows=1000,
        keys=1,
        distinct=((1, 1), (1024, 1024)),
        load_P=load_P,
    )


def profile(
    *,
    ranks: tuple[RankProfile, ...] = (LINK, LINK),
    tables: tuple[TableProfile, ...] = (table("a"), table("b")),
    work: WorkProfile = NO_WORK,
    layers: tuple[LayerProfile, ...] = (
        LayerProfile(name="l", parameters=0, forward_s=0, backward_s=0),
    ),
    events: int = 1000,
    budget_bytes: int = 1 << 30,
    cores: int = 3,
) -> Profile:
    """Return a profile of which everything that is not given takes no time."""
    return Profile(
        machine="a machine",
        cores=cores,
        events=events,
        tables=tables,
        layers=layers,
        ranks=ranks,
        work=work,
        budget_bytes=budget_bytes,
    )
