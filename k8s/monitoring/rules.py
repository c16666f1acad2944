"""What Prometheus computes: recording rules, and alerts with what to do about each.

An alert is a query that has a value at all times, and a bound: so tests can see that its metrics
exist while nothing is wrong. Queries keep the label `namespace`, which tells fleets apart where one
Prometheus watches several; it is empty elsewhere.
"""

import dataclasses
from typing import Literal

# Codes that say that the caller was wrong. Everything else is the fleet's fault; CANCELLED is a
# call whose deadline passed while it was at work.
_CALLERS_FAULT = "OK|INVALID_ARGUMENT|OUT_OF_RANGE|UNAUTHENTICATED|PERMISSION_DENIED|UNIMPLEMENTED"
# Reasons of requests that a node refused though their callers did nothing wrong.
_FLEETS_FAULT = "version|degraded|internal|expired|cancelled"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A query whose value is kept as a series of its own.

    Attributes:
        record: The series: the labels it keeps, the metric, and what was done to it.
        query: PromQL.
        about: Its meaning, for the page of alerts.
    """

    record: str
    query: str
    about: str


INFERENCES = Recording(
    record="namespace:embertide_inferences:rate1m",
    # Without our front end (`serve --front triton`) Triton's own counters have to do.
    query="""\
sum by (namespace) (rate(embertide_front_calls_total{method="ModelInfer"}[1m]))
or
sum by (namespace) (rate(nv_inference_request_success[1m]))
  + sum by (namespace) (rate(nv_inference_request_failure[1m]))""",
    about="inferences a second",
)
FAILED = Recording(
    record="namespace:embertide_inferences_failed:rate1m",
    query=f"""\
sum by (namespace) (
  rate(embertide_front_calls_total{{method="ModelInfer", code!~"{_CALLERS_FAULT}"}}[1m])
)
or
sum by (namespace) (rate(embertide_requests_refused_total{{reason=~"{_FLEETS_FAULT}"}}[1m]))
  + sum by (namespace) (rate(nv_inference_request_failure{{reason="REJECTED"}}[1m]))""",
    about="those of them that failed through no fault of their callers",
)
FAILED_SHARE = Recording(
    record="namespace:embertide_inferences_failed:ratio_rate1m",
    query=f"{FAILED.record} / ({INFERENCES.record} > 0)",
    about="their share",
)
DEGRADED_SHARE = Recording(
    record="namespace_model:embertide_keys_degraded:ratio_rate1m",
    query="""\
sum by (namespace, model) (rate(embertide_degraded_keys_total[1m]))
/ (sum by (namespace, model) (rate(embertide_lookup_keys_total[1m])) > 0)""",
    about="share of the keys asked for that no owner answered",
)
LATENCY = Recording(
    record="namespace:embertide_front_request_ms:p99_rate1m",
    query="""\
histogram_quantile(0.99, sum by (namespace, le) (rate(embertide_front_request_us_bucket[1m])))
/ 1000""",
    about="time in ms that 99 % of inferences stay below",
)
RECORDINGS = (INFERENCES, FAILED, FAILED_SHARE, DEGRADED_SHARE, LATENCY)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """Something to be told of.

    Attributes:
        name: The alert's name.
        severity: critical: callers get errors or default rows now; warning: they soon will, or
            answers grow old.
        query: PromQL that has a value whether or not anything is wrong.
        fires: The bound, as " > 0.01": the alert fires where it holds.
        lasts: For how long it must hold.
        summary: One line, with the labels that say where.
        means: Its meaning, for the page of alerts.
        look: The first thing to look at.
        act: The remedy.
        needs: The query's need that not every fleet meets: its absence is no fault.
    """

    name: str
    severity: Literal["critical", "warning"]
    query: str
    fires: str
    lasts: str
    summary: str
    means: str
    look: tuple[str, ...]
    act: tuple[str, ...]
    needs: str = ""

    @property
    def anchor(self) -> str:
        """Its section's, on the page of alerts."""
        return self.name.lower()

    @property
    def expression(self) -> str:
        """The query with its bound."""
        if "\n" in self.query or " or " in self.query or " and " in self.query:
            return f"(\n{self.query}\n) {self.fires}"
        return f"{self.query} {self.fires}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Alerts of one kind."""

    name: str
    title: str
    alerts: tuple[Alert, ...]


_ANSWERS = Group(
    name="embertide-answers",
    title="Answers",
    alerts=(
        Alert(
            name="EmbertideRequestsFail",
            severity="critical",
            query=FAILED_SHARE.record,
            fires="> 0.01",
            lasts="0s",
            summary="{{ $value | humanizePercentage }} of inferences fail",
            means=(
                "In the last minute more than 1 % of inferences failed through no fault of their "
                "callers. Requests that are malformed or not allowed do not count."
            ),
            look=(
                "The panel *Inferences by code* of the dashboard *Embertide*. RESOURCE_EXHAUSTED: "
                "too many requests; UNAVAILABLE: keys without an owner, or a node that starts; "
                "CANCELLED: the callers' deadline passed; INTERNAL: the node's log.",
                "The panels *Requests refused by a node* and *Calls refused by the front end* of "
                "*Embertide nodes*: they name the reason.",
            ),
            act=(
                "If EmbertideBucketsUnowned fires too, follow that section.",
                "Overload: add nodes ([Reshard](kubernetes.md#reshard)), or let fewer requests in.",
                "If one node alone fails, drain it (`embertide node drain NAME`), then restart it.",
            ),
        ),
        Alert(
            name="EmbertideAnswersDegraded",
            severity="critical",
            query=DEGRADED_SHARE.record,
            fires="> 0.01",
            lasts="10s",
            summary=(
                "{{ $value | humanizePercentage }} of the keys of model {{ $labels.model }} have "
                "no owner that answers"
            ),
            means=(
                "More than 1 % of the keys that requests ask for are answered with default rows, "
                "or fail their request, because no owner answered "
                "([serving](serving.md#when-peers-do-not-answer))."
            ),
            look=(
                "The panel *Degraded keys by reason* of *Embertide*: a dead owner, a timeout, or "
                "an owner that is too far behind.",
                "`embertide status`: which node is dead or does not reach its peers.",
            ),
            act=(
                "Bring the node back. It reads its buckets from the publication by itself.",
                "If it cannot come back, follow EmbertideBucketsUnowned.",
                "To survive the next loss, run two groups ([how](kubernetes.md#two-groups)).",
            ),
        ),
        Alert(
            name="EmbertideAnswersSlow",
            severity="warning",
            query=LATENCY.record,
            fires="> 100",
            lasts="1m",
            summary="99 % of inferences take up to {{ $value | humanize }} ms",
            means=(
                "The slowest 1 % of inferences take over 100 ms, for a minute. Change the bound to "
                "the time that your callers give a request."
            ),
            look=(
                "The panel *Time by stage, p99* of *Embertide nodes*: which stage takes the time "
                "([stages](serving.md#stages-of-a-request)).",
                "*Inferences at work*: a node at its limit is overloaded.",
                "*Keys by source*: a growing share of `ssd` or `remote` costs time.",
            ),
            act=(
                "Queue or net: add nodes. Peers: `embertide hot`, then `embertide reshard "
                "--planner auto`. SSD: raise the DDR budget.",
            ),
            needs="our front end",
        ),
    ),
)
_FLEET = Group(
    name="embertide-fleet",
    title="Fleet",
    alerts=(
        Alert(
            name="EmbertideBucketsUnowned",
            severity="critical",
            query="max by (namespace, model) (embertide_control_buckets_unowned)",
            fires="> 0",
            lasts="5s",
            summary="{{ $value }} buckets of model {{ $labels.model }} have no live owner",
            means=(
                "Some buckets have no live owner. Their keys are answered with default rows, or "
                "requests for them fail."
            ),
            look=("`embertide status`: which nodes are dead, and since when.",),
            act=(
                "Start the dead node again under its name: it comes back with its buckets.",
                "If it cannot come back, `embertide node remove NAME` and `embertide reshard`: "
                "other nodes load its buckets from the publication.",
            ),
            needs="a control plane",
        ),
        Alert(
            name="EmbertideNodeDead",
            severity="warning",
            query='max by (namespace, model) (embertide_control_nodes{state="dead"})',
            fires="> 0",
            lasts="5s",
            summary="{{ $value }} nodes of model {{ $labels.model }} are dead",
            means=(
                "A registered node missed five beats. Its buckets have other owners, or "
                "EmbertideBucketsUnowned fires too; the others carry its load."
            ),
            look=(
                "`embertide status`: the node's name, host and last beat.",
                "The node's log. If it runs, it does not reach the control plane: look at the "
                "network and at its `--control`.",
            ),
            act=("Start it again, or `embertide node remove NAME` if it is gone for good.",),
            needs="a control plane",
        ),
        Alert(
            name="EmbertideControlPlaneAway",
            severity="warning",
            # A node's model is Triton's name, which need not be that of the fleet.
            query="""\
min by (namespace) (max by (namespace, model) (embertide_control_leads))
or
0 * group by (namespace) (embertide_peers_alive)""",
            fires="< 1",
            lasts="10s",
            summary="no control plane leads",
            means=(
                "Nodes are there, and no control plane decides for them. They serve on by their "
                "last plan; nobody notices deaths, moves buckets or follows the drift."
            ),
            look=(
                "Whether a process of `embertide control` runs, and its log.",
                "Whether its state store answers: `redis-cli -u URL ping`.",
                "Whether Prometheus scrapes its `--metrics-port`.",
            ),
            act=(
                "Start it again with the same `--state`: it goes on where it was. For a second one "
                "that takes over, see [control](control.md).",
            ),
            needs="a control plane",
        ),
        Alert(
            name="EmbertidePlansNotFollowed",
            severity="warning",
            query="min by (namespace, model) (embertide_control_plans_followed)",
            fires="< 1",
            lasts="10s",
            summary="nodes of model {{ $labels.model }} act by plans that the state store lacks",
            means=(
                "The state store lost its keys, or is not the one that the nodes use. The control "
                "plane accepts no operation."
            ),
            look=("The log of the control plane; the `--state` of nodes and control plane.",),
            act=("[Adopt the plan of the nodes](control.md#a-state-store-that-lost-its-keys).",),
            needs="a control plane",
        ),
        Alert(
            name="EmbertideTaskFails",
            severity="warning",
            query="""\
embertide_task_failing
or
embertide_control_task_ok == bool 0
or
embertide_trainer_background_ok == bool 0""",
            fires="> 0",
            lasts="1m",
            summary=("task {{ or $labels.task $labels.what }} of {{ $labels.instance }} fails"),
            means="Work in the background has failed for a minute; it is tried again.",
            look=(
                "`embertide status` has the error, and so has the log of the process.",
                "What the task does: of a "
                "[node](serving.md#when-something-fails-in-the-background).",
            ),
            act=("Remove the cause that the error names; nothing needs a restart.",),
        ),
        Alert(
            name="EmbertideNotScraped",
            severity="warning",
            query='min by (namespace, job, instance) (up{job=~"embertide-(node|control)"})',
            fires="< 1",
            lasts="1m",
            summary="{{ $labels.job }} at {{ $labels.instance }} shows no metrics",
            means="Prometheus gets no metrics of a process: it is gone, or cannot be reached.",
            look=("*Status, Targets* of Prometheus: the error of the scrape.",),
            act=(
                "Start the process, or repair the network. Take what is gone for good out of the "
                "scrape configuration.",
            ),
        ),
    ),
)
_FRESHNESS = Group(
    name="embertide-freshness",
    title="Freshness",
    alerts=(
        Alert(
            name="EmbertideTrainerDown",
            severity="warning",
            query=('sum by (namespace, model) (embertide_control_trainer{state=~"silent|failed"})'),
            fires="> 0",
            lasts="0s",
            summary="the trainer of model {{ $labels.model }} is dead or has failed",
            means=(
                "The trainer ended with an error, or has given no sign of life for ten seconds. "
                "Nodes serve the last version, which grows old. A trainer that was stopped or came "
                "to its end raises no alert."
            ),
            look=(
                "`embertide status`: host, folder and error of the trainer.",
                "The trainer's log.",
            ),
            act=(
                "Start it again with the same command: it goes on from its newest checkpoint. For "
                "messages see [troubleshooting](troubleshooting.md#going-on-and-changing-a-run).",
            ),
            needs="a control plane with `--bus`",
        ),
        Alert(
            name="EmbertideTrainerLags",
            severity="warning",
            query="""\
sum by (namespace, job, instance) (embertide_trainer_source_lag)
/ sum by (namespace, job, instance) (rate(embertide_trainer_events_total[5m]))""",
            fires="> 300",
            lasts="5m",
            summary="{{ $labels.instance }} needs {{ $value | humanizeDuration }} to catch up",
            means=(
                "At its present speed the trainer needs over five minutes to read what waits in "
                "its source. Versions are that much behind what happens."
            ),
            look=(
                "*Unread events* and *Events a second* of *Embertide training*: are there more "
                "events, or is it slower?",
                "`embertide step-profile`: what bounds a step.",
            ),
            act=(
                "Wait if it falls after an outage. Otherwise train by more ranks "
                "([how](training.md#many-ranks)).",
            ),
            needs="a source that tells its lag",
        ),
        Alert(
            name="EmbertideEventsRejected",
            severity="warning",
            query="""\
(
  sum by (namespace, job, instance) (rate(embertide_trainer_rejected_events_total[5m]))
  or
  0 * sum by (namespace, job, instance) (rate(embertide_trainer_events_total[5m]))
)
/ sum by (namespace, job, instance) (rate(embertide_trainer_events_total[5m]))""",
            fires="> 0.1",
            lasts="2m",
            summary="{{ $labels.instance }} rejects {{ $value | humanizePercentage }} of its input",
            means="The trainer cannot use over a tenth of the events, and learns without them.",
            look=(
                "*Events rejected by reason* of *Embertide training*.",
                "`dead_letters.jsonl` in the publication's folder: the first rejected events.",
            ),
            act=("Repair the producer; events that were rejected are not learned later.",),
        ),
        Alert(
            name="EmbertideVersionsStale",
            severity="warning",
            query="""\
max by (namespace, model) (embertide_version_age_ms) / 1000
and on (namespace)
(max by (namespace) (embertide_control_trainer{state="alive"}) == 1)""",
            fires="> 600",
            lasts="0s",
            summary=(
                "model {{ $labels.model }} answers at a version of {{ $value | humanizeDuration }} "
                "ago"
            ),
            means=(
                "A trainer runs, and some node answers at a version that is over ten minutes old. "
                "Raise the bound if your trainer publishes less often, or if hours without events "
                "are normal."
            ),
            look=(
                "*Age of answers* of *Embertide*. If all nodes are old, the trainer publishes "
                "nothing; if one is, that node does not take versions.",
                "*Versions published* and *Events a second* of *Embertide training*.",
                "With a guard: *Versions withdrawn*, and `embertide_versions_held`.",
            ),
            act=(
                "No events: look at what feeds the trainer.",
                "A node alone: its log says why it does not follow; see EmbertideNodeBehind.",
            ),
            needs="a control plane with `--bus`",
        ),
        Alert(
            name="EmbertideNodeBehind",
            severity="warning",
            query="min by (namespace, model, instance) (embertide_ready)",
            fires="< 1",
            lasts="15s",
            summary="{{ $labels.instance }} is behind the newest version",
            means=(
                "A node is more than `ready_staleness_ms` behind what is published "
                "([readiness](serving.md#readiness)), or starts. Load balancers leave it out."
            ),
            look=("Its log: `is not ready: ...` gives the reason.",),
            act=(
                "If its disk or memory is full, free some. If it comes back and falls behind "
                "again, versions are larger than it can apply: publish less often.",
            ),
            needs="a publication",
        ),
        Alert(
            name="EmbertideBusAway",
            severity="warning",
            query="min by (namespace, model, instance) (embertide_bus_connected)",
            fires="< 1",
            lasts="10s",
            summary="{{ $labels.instance }} cannot read the bus",
            means="Redis does not answer a node. It follows by files meanwhile, which is slower.",
            look=("Whether the Redis runs, its memory and its log; the network.",),
            act=("Start it again. It may come back empty: nodes repair themselves from files.",),
            needs="a bus",
        ),
    ),
)
_VERSIONS = Group(
    name="embertide-versions",
    title="Versions and room",
    alerts=(
        Alert(
            name="EmbertideVersionsRefused",
            severity="warning",
            query="""\
sum by (namespace, model, instance) (
  increase(embertide_bus_events_total{event=~"refused|other_schema"}[5m])
)""",
            fires="> 0",
            lasts="0s",
            summary="{{ $labels.instance }} refused versions of model {{ $labels.model }}",
            means=(
                "A node could not take a version. There was no memory for it beside the one that "
                "is served, or it has a schema that the node has not loaded."
            ),
            look=("The node's log, and *Bytes by tier* of *Embertide nodes*.",),
            act=(
                "Raise `ddr_budget_bytes`, or restart the node: it loads the newest version alone.",
                "Another schema: [change the schema](serving.md) of the fleet.",
            ),
            needs="a bus",
        ),
        Alert(
            name="EmbertideRowsRefused",
            severity="warning",
            query="""\
sum by (namespace, model, instance) (increase(embertide_rows_refused_total[5m]))""",
            fires="> 0",
            lasts="0s",
            summary="{{ $labels.instance }} had no room for {{ $value }} rows",
            means="Rows of new versions found room in no tier: their keys get the default row.",
            look=("*Bytes by tier* and *Room on drives* of *Embertide nodes*.",),
            act=("Raise the budget of DDR or of the SSD, or add a node ([sizing](sizing.md)).",),
        ),
        Alert(
            name="EmbertideVersionsWithdrawn",
            severity="warning",
            query="""\
max by (namespace, model, reason) (
  increase(embertide_versions_withdrawn_total{reason!~"rollback|operator"}[5m])
)""",
            fires="> 0",
            lasts="0s",
            summary="the guard withdrew a version of {{ $labels.model }}: {{ $labels.reason }}",
            means="The guard judged a new version to be bad. Users get the one before.",
            look=(
                "The log of `embertide guard`: the figures of the version and of the one before.",
                "*AUC* and *Log loss* of *Embertide training*, and what changed in the events.",
            ),
            act=(
                "If the events were wrong, [roll back](guard.md#rollback), and start the trainer "
                "with `--skip-undone`.",
            ),
            needs="a guard",
        ),
        Alert(
            name="EmbertideDriveNearlyFull",
            severity="warning",
            query="embertide_drive_free_bytes / embertide_drive_bytes",
            fires="< 0.1",
            lasts="15s",
            summary=(
                "{{ $value | humanizePercentage }} of the drive of {{ $labels.folder }} is free at "
                "{{ $labels.instance }}"
            ),
            means=(
                "A drive that Embertide writes to is over 90 % full. On a full one a trainer "
                "publishes nothing, and rows of a node stay in DDR, which then evicts."
            ),
            look=("`df`, and *Room on drives* of *Embertide nodes* and *Embertide training*.",),
            act=(
                "Free some, or keep fewer snapshots (`keep_snapshots`, `keep_snapshots_s`). What "
                "was full goes on by itself.",
            ),
        ),
    ),
)
GROUPS = (_ANSWERS, _FLEET, _FRESHNESS, _VERSIONS)
ALERTS = tuple(alert for group in GROUPS for alert in group.alerts)
