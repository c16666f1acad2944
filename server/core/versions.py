"""The newest versions, with their quality and what was decided on them."""

from embertide.server.core.news import News, Promotion, RollbackNews
from embertide.v1 import control_pb2, update_pb2

VERSIONS_KEPT = 200
Verdict = control_pb2.VersionVerdict


class Versions:
    """The newest 200 by lineage and number, as the bus told. Used by one thread at a time."""

    def __init__(self) -> None:
        """Begin without any."""
        self._found: dict[tuple[int, int], control_pb2.FleetVersion] = {}
        self._promotion = Promotion()
        self._bus: control_pb2.BusStatus | None = None
        self._rollback = RollbackNews()

    def hear(self, news: News) -> None:
        """Take in what is new."""
        for commit in news.commits:
            version = commit.version
            self._found[version.lineage, version.number] = _version(commit)
        for oldest in sorted(self._found)[:-VERSIONS_KEPT]:
            del self._found[oldest]
        self._promotion = news.promotion or self._promotion
        self._bus = news.bus
        self._rollback = news.rollback
        if news.trainer is not None and news.trainer.sign.HasField("quality"):
            sign = news.trainer.sign
            told = self._found.get((sign.lineage, sign.version))
            if told is not None:
                told.quality.CopyFrom(sign.quality)

    def answer(self) -> control_pb2.ListVersionsResponse:
        """Return them, newest first."""
        promotion = self._promotion
        answer = control_pb2.ListVersionsResponse(
            promoted=promotion.promoted,
            bus=self._bus,
            rollback_order=self._rollback.order,
            rollback_outcome=self._rollback.outcome,
        )
        for _, each in sorted(self._found.items(), reverse=True):
            number = each.version.number
            told = answer.versions.add()
            told.CopyFrom(each)
            told.author = next((u.by for u in promotion.undone if u.number == number), "")
            withdrawn = next(
                (w for w in reversed(promotion.withdrawn) if w.first <= number <= w.last), None
            )
            if withdrawn is not None:
                told.verdict, told.author = Verdict.VERSION_VERDICT_WITHDRAWN, withdrawn.by
                told.why = ": ".join(filter(None, (withdrawn.reason, withdrawn.detail)))
            elif promotion.promoted:
                told.verdict = (
                    Verdict.VERSION_VERDICT_PROMOTED
                    if number <= promotion.promoted
                    else Verdict.VERSION_VERDICT_CANDIDATE
                )
        return answer


def _version(commit: update_pb2.GlobalCommit) -> control_pb2.FleetVersion:
    return control_pb2.FleetVersion(
        version=commit.version,
        committed_ms=commit.committed_ms,
        watermark_ms=commit.watermark_ms,
        schema_id=commit.schema_id,
        rollback_to=commit.rollback_to,
        dense_bytes=commit.dense_bytes,
        partitions=len(commit.partitions),
    )
