"""The contents of dashboards: each panel with its queries, without Grafana's words for it.

`$namespace`, `$model` and `$instance` are what the viewer chose; all of them by default.
"""

import dataclasses
from typing import Literal

from k8s.monitoring.rules import DEGRADED_SHARE, FAILED_SHARE, LATENCY

_F = 'namespace=~"$namespace"'
_M = f'{_F}, model=~"$model"'
_N = f'{_M}, instance=~"$instance"'
_I = f'{_F}, instance=~"$instance"'
_RATE = "[$__rate_interval]"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One picture.

    Attributes:
        title: Over it.
        unit: Grafana's name of the unit of all values.
        queries: PromQL, with what names its series.
        about: The meaning of the picture, and of a good one.
        kind: lines over time, one number, or a state over time.
        bounds: From where a number is yellow, and red.
        only: The event without which it shows nothing. Empty: it always shows something.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str
    kind: Literal["lines", "number", "states"] = "lines"
    bounds: tuple[float, float] | None = None
    only: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """A dashboard.

    Attributes:
        uid: The dashboard's id, and the name of its file.
        title: Over it.
        choices: Variables, each with the query of its values.
        rows: Panels, by the title over them.
    """

    uid: str
    title: str
    choices: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All of them."""
        return tuple(panel for _, panels in self.rows for panel in panels)


def _share(metric: str, label: str, where: str) -> str:
    """Return the share of each value of a label."""
    rate = f"rate({metric}{{{where}}}{_RATE})"
    return f"sum by ({label}) ({rate}) / scalar(sum({rate}))"


def _quantile(share: float, metric: str, where: str, *labels: str) -> str:
    by = ", ".join(("le", *labels))
    rate = f"rate({metric}_bucket{{{where}}}{_RATE})"
    return f"histogram_quantile({share:g}, sum by ({by}) ({rate})) / 1000"


_CALLERS = (
    Panel(
        title="Failed inferences",
        kind="number",
        unit="percentunit",
        queries=((f"{FAILED_SHARE.record}{{{_F}}}", "{{namespace}}"),),
        about="Share of inferences that failed in the last minute through no fault of a caller.",
        bounds=(0.001, 0.01),
    ),
    Panel(
        title="Degraded keys",
        kind="number",
        unit="percentunit",
        queries=((f"{DEGRADED_SHARE.record}{{{_M}}}", "{{model}}"),),
        about="Share of keys that no owner answered in the last minute.",
        bounds=(0.001, 0.01),
    ),
    Panel(
        title="Latency, p99",
        kind="number",
        unit="ms",
        queries=((f"{LATENCY.record}{{{_F}}}", "{{namespace}}"),),
        about="From the last byte of a request to its answer's sending, in the last minute.",
        bounds=(50, 100),
    ),
    Panel(
        title="Buckets without an owner",
        kind="number",
        unit="none",
        queries=((f"sum by (model) (embertide_control_buckets_unowned{{{_M}}})", "{{model}}"),),
        about="Buckets that no live node holds.",
        bounds=(1, 1),
    ),
    Panel(
        title="Inferences by code",
        unit="reqps",
        queries=(
            (
                "sum by (code) (rate(embertide_front_calls_total"
                f'{{{_F}, method="ModelInfer"}}{_RATE}))',
                "{{code}}",
            ),
        ),
        about="Inferences by gRPC's code of their end, as callers saw it.",
    ),
    Panel(
        title="Latency",
        unit="ms",
        queries=tuple(
            (_quantile(share, "embertide_front_request_us", _F), f"p{share * 100:g}")
            for share in (0.5, 0.9, 0.99)
        ),
        about="From the last byte of a request to its answer's sending.",
    ),
    Panel(
        title="Degraded keys by reason",
        unit="cps",
        queries=(
            (f"sum by (reason) (rate(embertide_degraded_keys_total{{{_M}}}{_RATE}))", "{{reason}}"),
        ),
        about="Keys that no owner answered, by what was wrong with the owners.",
    ),
)
_FRESHNESS = (
    Panel(
        title="Age of answers",
        unit="s",
        queries=((f"embertide_version_age_ms{{{_M}}} / 1000", "{{instance}}"),),
        about=(
            "Since the commit of the version that each node answers at. It climbs from one version "
            "to the next."
        ),
    ),
    Panel(
        title="From commit to answer",
        unit="ms",
        queries=((f"embertide_freshness_ms{{{_M}}}", "{{instance}}"),),
        about="How long each node took to take the newest version.",
    ),
    Panel(
        title="Trainer",
        kind="states",
        unit="none",
        queries=((f"embertide_control_trainer{{{_M}}} == 1", "{{model}} {{state}}"),),
        about="What the control plane knows of the trainer of each model.",
    ),
    Panel(
        title="Events that the trainer has not read",
        unit="short",
        queries=((f"embertide_control_trainer_unread{{{_M}}}", "{{model}}"),),
        about="What its source has more than the trainer has read.",
    ),
)
_FLEET = (
    Panel(
        title="Nodes by state",
        unit="none",
        queries=((f"sum by (state) (embertide_control_nodes{{{_M}}})", "{{state}}"),),
        about="Registered nodes.",
    ),
    Panel(
        title="Keys by source",
        unit="percentunit",
        queries=((_share("embertide_lookup_keys_total", "source", _M), "{{source}}"),),
        about="Where the answers come from. `unanswered` and `remote` cost; `hbm`, `ddr` are near.",
    ),
    Panel(
        title="Plan and operations",
        unit="none",
        queries=(
            (f"embertide_control_plan_epoch{{{_M}}}", "epoch {{model}}"),
            (f"embertide_control_operations_active{{{_M}}}", "operations {{model}}"),
        ),
        about="A new epoch is a new plan: buckets move.",
    ),
    Panel(
        title="What happened to the fleet",
        unit="none",
        queries=(
            (
                f"sum by (what) (increase(embertide_control_events_total{{{_M}}}{_RATE}))",
                "{{what}}",
            ),
        ),
        about="Deaths and returns of nodes, operations. `embertide console` has their times.",
        only="a node that registered, died or came back, or an operation",
    ),
)
_REQUESTS = (
    Panel(
        title="Inferences",
        unit="reqps",
        queries=(
            (
                "sum by (instance) (rate(embertide_front_calls_total"
                f'{{{_I}, method="ModelInfer"}}{_RATE}))',
                "{{instance}}",
            ),
        ),
        about="Inferences of each node. Even load is even here.",
    ),
    Panel(
        title="Time by stage, p99",
        unit="ms",
        queries=((_quantile(0.99, "embertide_front_stage_us", _I, "stage"), "{{stage}}"),),
        about="Where the slowest requests spend their time.",
    ),
    Panel(
        title="Time to look rows up",
        unit="ms",
        queries=tuple(
            (_quantile(share, "embertide_lookup_duration_us", _N), f"p{share * 100:g}")
            for share in (0.5, 0.99)
        ),
        about="Finding and pooling the rows of one execution, those of peers included.",
    ),
    Panel(
        title="Inferences at work",
        unit="none",
        queries=(
            (f"embertide_front_inferences{{{_I}}}", "{{instance}}"),
            (f'max(embertide_front_limit{{{_I}, of="inferences"}})', "limit"),
        ),
        about="At the limit, further requests are refused (RESOURCE_EXHAUSTED).",
    ),
    Panel(
        title="Requests refused by a node",
        unit="reqps",
        queries=(
            (
                f"sum by (reason) (rate(embertide_requests_refused_total{{{_N}}}{_RATE}))",
                "{{reason}}",
            ),
        ),
        about="`version`, `degraded`, `internal`, `expired` are the fleet's; the rest is callers'.",
    ),
    Panel(
        title="Calls refused by the front end",
        unit="reqps",
        queries=(
            (f"sum by (reason) (rate(embertide_front_refused_total{{{_I}}}{_RATE}))", "{{reason}}"),
        ),
        about="Who may not call, and calls beyond the bounds of all or of one caller.",
    ),
)
_ROWS = (
    Panel(
        title="Keys by source of each node",
        unit="percentunit",
        queries=((_share("embertide_lookup_keys_total", "source", _N), "{{source}}"),),
        about="Where the answers come from.",
    ),
    Panel(
        title="Bytes by tier",
        unit="bytes",
        queries=((f"embertide_tier_bytes{{{_N}}}", "{{instance}} {{tier}}"),),
        about="What rows and index take. A tier at its budget evicts.",
    ),
    Panel(
        title="Rows moved between DDR and SSD",
        unit="cps",
        queries=(
            (
                f"sum by (direction) (rate(embertide_rows_moved_total{{{_N}}}{_RATE}))",
                "{{direction}}",
            ),
        ),
        about="Many of both: DDR is too small for the rows that are read.",
    ),
    Panel(
        title="Bytes of the SSD",
        unit="Bps",
        queries=((f"sum by (kind) (rate(embertide_ssd_bytes_total{{{_N}}}{_RATE}))", "{{kind}}"),),
        about="Written bytes wear the drive.",
        only="an SSD tier",
    ),
    Panel(
        title="Room on drives",
        unit="percentunit",
        queries=(
            (
                f"embertide_drive_free_bytes{{{_I}}} / embertide_drive_bytes{{{_I}}}",
                "{{instance}} {{folder}}",
            ),
        ),
        about="Free share of the drive of each folder that is written to.",
        only="an SSD tier",
    ),
    Panel(
        title="Rows without room",
        unit="cps",
        queries=(
            (
                f"sum by (instance) (rate(embertide_rows_refused_total{{{_N}}}{_RATE}))",
                "{{instance}}",
            ),
        ),
        about="Rows of versions that no tier had room for: their keys get the default row.",
    ),
)
_FOLLOWING = (
    Panel(
        title="Version",
        unit="none",
        queries=((f"embertide_version{{{_N}}}", "{{instance}}"),),
        about="The version that each node answers at. They climb together.",
    ),
    Panel(
        title="Peers that answer",
        unit="none",
        queries=((f"embertide_peers_alive{{{_N}}}", "{{instance}}"),),
        about="Other nodes of its group that each node reaches.",
        only="a control plane",
    ),
    Panel(
        title="What happened to versions",
        unit="cps",
        queries=(
            (
                "sum by (event) (rate(embertide_bus_events_total"
                f'{{{_N}, event!~"version|row|repeat"}}{_RATE}))',
                "{{event}}",
            ),
        ),
        about="Gaps and corrupt messages are repaired from files; `refused` had no room.",
    ),
    Panel(
        title="Versions withdrawn",
        unit="none",
        queries=(
            (
                f"max by (reason) (increase(embertide_versions_withdrawn_total{{{_N}}}{_RATE}))",
                "{{reason}}",
            ),
        ),
        about="By the guard, a rollback or an operator.",
        only="a guard",
    ),
    Panel(
        title="Tasks that fail",
        unit="none",
        queries=((f"embertide_task_failing{{{_N}}} > 0", "{{instance}} {{task}}"),),
        about="Nothing here is good.",
        only="a task that fails",
    ),
)
_LEARNING = (
    Panel(
        title="Events a second",
        unit="cps",
        queries=((f"rate(embertide_trainer_events_total{{{_I}}}{_RATE})", "{{instance}}"),),
        about="Events learned from.",
    ),
    Panel(
        title="AUC",
        unit="none",
        queries=((f"embertide_trainer_auc{{{_I}}}", "{{instance}}"),),
        about="Each event was scored before it was learned from; of the current day of event time.",
    ),
    Panel(
        title="Log loss",
        unit="none",
        queries=((f"embertide_trainer_quality_log_loss{{{_I}}}", "{{of}}"),),
        about="Of the current day of event time; lower is better.",
    ),
    Panel(
        title="Calibration",
        unit="none",
        queries=((f"embertide_trainer_quality_calibration{{{_I}}}", "{{of}}"),),
        about="Predicted over observed positives: 1 is right.",
    ),
)
_SOURCE = (
    Panel(
        title="Unread events",
        unit="short",
        queries=((f"embertide_trainer_source_lag{{{_I}}}", "{{input}}"),),
        about="What the source has more than was read.",
        only="a Redis Stream or Kafka",
    ),
    Panel(
        title="Events rejected by reason",
        unit="cps",
        queries=(
            (
                f"sum by (reason) (rate(embertide_trainer_rejected_events_total{{{_I}}}{_RATE}))",
                "{{reason}}",
            ),
        ),
        about="Events that cannot be learned from; the first are in `dead_letters.jsonl`.",
        only="a rejected event",
    ),
    Panel(
        title="What happened to the source",
        unit="none",
        queries=(
            (
                f"sum by (event) (increase(embertide_trainer_source_events_total{{{_I}}}{_RATE}))",
                "{{event}}",
            ),
        ),
        about="Lost connections, and what was read again.",
        only="a Redis Stream or Kafka",
    ),
)
_PUBLISHING = (
    Panel(
        title="Versions published",
        unit="cpm",
        queries=(
            (
                f'rate(embertide_trainer_published_total{{{_I}, what="versions"}}{_RATE}) * 60',
                "{{instance}}",
            ),
        ),
        about="Versions a minute.",
    ),
    Panel(
        title="Bytes published",
        unit="Bps",
        queries=(
            (
                f'rate(embertide_trainer_published_total{{{_I}, what="bytes"}}{_RATE})',
                "{{instance}}",
            ),
        ),
        about="What versions take on the bus.",
    ),
    Panel(
        title="What went wrong with versions",
        unit="none",
        queries=(
            (
                "sum by (what) (increase(embertide_trainer_published_total"
                f'{{{_I}, what!~"versions|rows|bytes"}}{_RATE}))',
                "{{what}}",
            ),
        ),
        about="Versions by files alone, drives without room, and more.",
    ),
    Panel(
        title="Time of a checkpoint",
        unit="s",
        queries=(
            (
                f"rate(embertide_trainer_checkpoint_seconds_total{{{_I}}}[10m])\n"
                f"/ (rate(embertide_trainer_checkpoints_total{{{_I}}}[10m]) > 0)",
                "{{instance}}",
            ),
        ),
        about="With its snapshot, in the last ten minutes.",
        only="a checkpoint",
    ),
    Panel(
        title="Rows and bytes of the trainer",
        unit="bytes",
        queries=((f"embertide_trainer_bytes{{{_I}}}", "{{tier}}"),),
        about="What its tables take, by tier.",
    ),
    Panel(
        title="Room on the drive of the publication",
        unit="percentunit",
        queries=(
            (
                f'embertide_drive_free_bytes{{{_I}, model=""}}\n'
                f'/ embertide_drive_bytes{{{_I}, model=""}}',
                "{{folder}}",
            ),
        ),
        about="Free share. Without room no version is published.",
    ),
)
_NAMESPACE = ("namespace", "label_values(up, namespace)")
BOARDS = (
    Board(
        uid="embertide",
        title="Embertide",
        choices=(
            _NAMESPACE,
            ("model", 'label_values(embertide_version{namespace=~"$namespace"}, model)'),
        ),
        rows=(
            ("Are callers hurt?", _CALLERS),
            ("How fresh are answers?", _FRESHNESS),
            ("How is the fleet?", _FLEET),
        ),
    ),
    Board(
        uid="embertide-nodes",
        title="Embertide nodes",
        choices=(
            _NAMESPACE,
            ("model", 'label_values(embertide_version{namespace=~"$namespace"}, model)'),
            ("instance", 'label_values(embertide_version{namespace=~"$namespace"}, instance)'),
        ),
        rows=(
            ("Requests", _REQUESTS),
            ("Rows and drives", _ROWS),
            ("Versions, peers and tasks", _FOLLOWING),
        ),
    ),
    Board(
        uid="embertide-training",
        title="Embertide training",
        choices=(
            _NAMESPACE,
            (
                "instance",
                'label_values(embertide_trainer_events_total{namespace=~"$namespace"}, instance)',
            ),
        ),
        rows=(
            ("What is learned", _LEARNING),
            ("What it reads", _SOURCE),
            ("What it publishes", _PUBLISHING),
        ),
    ),
)
