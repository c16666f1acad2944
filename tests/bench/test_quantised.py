"""Rows in fewer bits, as the benchmark of the trainer holds them: against a plain dictionary."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from bench.train import quantised
from bench.train.codebooks import CODEWORDS, Codebook, Floats
from bench.train.quantised import FORMS, Copies
from bench.train.runs import Stream
from embertide import _store
from embertide.trainer.config import CountersConfig, TableConfig
from tests.bench.test_train import KEYS, _in_process

DIM = 8
RNG = np.random.default_rng(9)


def _values(rng: np.random.Generator, rows: int, dim: int = DIM) -> Floats:
    return rng.normal(0, 1, (rows, dim)).astype(np.float32)


def test_a_codebook_decodes_what_it_encodes_to_the_nearest_codeword() -> None:
    rng = np.random.default_rng(1)
    values_ND = _values(rng, 2000)
    book = Codebook.learned(values_ND, 4, None, 1)
    codes_NS = book.encode(values_ND)
    assert codes_NS.shape == (2000, 2)
    assert book.bytes == 2 * CODEWORDS * 4 * 2
    words_SKd = book.words_SKd.numpy()
    for s in range(2):
        piece_Nd = values_ND[:, 4 * s : 4 * s + 4]
        away_NK = np.square(piece_Nd[:, None] - words_SKd[s][None]).sum(axis=2)
        best_N = away_NK[np.arange(2000), codes_NS[:, s]]
        np.testing.assert_allclose(best_N, away_NK.min(axis=1), atol=1e-4)
    decoded_ND = book.decode(codes_NS)
    assert np.square(decoded_ND - values_ND).mean() < 0.25
    np.testing.assert_array_equal(book.encode(decoded_ND), codes_NS)


def test_a_codebook_that_is_renewed_names_much_the_same() -> None:
    rng = np.random.default_rng(2)
    values_ND = _values(rng, 3000)
    book = Codebook.learned(values_ND, 2, None, 1)
    again = Codebook.learned(values_ND, 2, book, 2)
    moved = (book.encode(values_ND) != again.encode(values_ND)).mean()
    other = Codebook.learned(values_ND, 2, None, 3)
    assert moved < 0.5 < (book.encode(values_ND) != other.encode(values_ND)).mean()
    off_ND = values_ND + np.float32(1.5)

    def error(of: Codebook) -> float:
        return float(np.square(of.decode(of.encode(off_ND)) - off_ND).mean())

    assert error(Codebook.learned(off_ND, 2, book, 4)) < error(book)


def test_steps_are_those_of_the_rows_scale() -> None:
    values_ND = _values(np.random.default_rng(3), 500)
    values_ND[0] = 0
    for form, most in ((quantised.stored("int8"), 127), (quantised.one_scale, 7)):
        half_N = np.abs(values_ND).max(axis=1) / most / 2
        assert (np.abs(form(values_ND) - values_ND).max(axis=1) <= half_N * 1.0001).all()
    for dtype in ("fp16", "int8", "int4"):
        layout = _store.RowLayout(dtype=dtype, chunk_dim=DIM)
        served_ND = quantised.stored(dtype)(values_ND)
        for value_D, found_D in zip(values_ND[:50], served_ND, strict=False):
            payload = _store.encode_payload(layout, 1, value_D)
            records = _store.encode_record(1, 1, 0, payload)
            np.testing.assert_array_equal(_store.decode_records(layout, records)[3][0], found_D)


def test_four_bits_are_steps_from_the_least_value_on() -> None:
    values_ND = _values(np.random.default_rng(3), 500)
    values_ND[0] = 0
    found_ND = quantised.least_and_step(values_ND)
    step_N = (values_ND.max(axis=1) - values_ND.min(axis=1)) / 15
    # Step and least value are rounded to fp16.
    assert (np.abs(found_ND - values_ND).max(axis=1) <= step_N * 0.52 + 0.002).all()
    assert (
        max(len(np.unique(found_D)) for found_D in quantised.least_and_step(_values(RNG, 50, 64)))
        == 16
    )
    assert not found_ND[0].any()

    def error(form: Any) -> float:
        return float(np.square(form(values_ND) - values_ND).sum())

    errors = [error(quantised.least_and_step), error(quantised.stored("int4"))]
    assert errors == sorted(errors)
    assert errors[-1] < error(quantised.one_scale)


def test_copies_are_those_of_a_dictionary_through_changes_and_tombstones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantised, "_FEWEST", CODEWORDS)
    rng = np.random.default_rng(4)
    counters = CountersConfig(feature="f", half_lives_s=(60,))
    table = TableConfig(name="t", dim=DIM, chunks=2, counters=counters)
    copies = Copies(table, FORMS, 1)
    rows: dict[int, tuple[int, Floats]] = {}
    sent = 0
    for version in range(1, 14):
        keys = rng.choice(1500, 400, replace=False).astype(np.uint64)
        # Chunks die when codebooks are there: zeros are no codeword then.
        dead = 0.2 if version > 12 else 0
        live_N = rng.choice(4, 400, p=(0.1, dead, dead, 0.9 - 2 * dead)).astype(np.uint16)
        live_N[live_N > 0] |= 4  # the counters
        values_NW = _values(rng, 400, table.width)
        values_NW[:, :4] *= (live_N & 1 > 0)[:, None]
        values_NW[:, 4:8] *= (live_N & 2 > 0)[:, None]
        copies.take(keys, live_N, values_NW, version)
        copies.end_of_version(version)
        for key, live, values_W in zip(keys.tolist(), live_N.tolist(), values_NW, strict=True):
            rows.pop(key, None)
            if live:
                rows[key] = live, values_W
        sent = sum(12 + 16 * live.bit_count() for live in live_N.tolist())
        assert copies.held[0].sent[-1] == sent
    assert len(copies) == len(rows)
    slot_N = copies.find(np.arange(-5, 1600))
    held_N = slot_N >= 0
    assert set((np.arange(-5, 1600)[held_N]).tolist()) == set(rows)
    for held in copies.held:
        for key, slot in zip(np.arange(-5, 1600)[held_N].tolist(), slot_N[held_N], strict=True):
            live, values_W = rows[key]
            found_D = held.values_RD[slot]
            if held.form.served is not None:
                want_D = held.form.served(values_W[None, :DIM])[0]
            else:
                assert held.book is not None
                scale_N1 = quantised._scale(held.form, values_W[None, :DIM])
                codes_NS = held.book.encode(values_W[None, :DIM] / scale_N1)
                want_D = (held.book.decode(codes_NS) * scale_N1)[0]
                want_D = want_D * np.repeat([live & 1, live >> 1 & 1], 4)
            np.testing.assert_array_equal(found_D, want_D)
    plain = copies.held[0]
    (coded,) = [held for held in copies.held if held.form.name == "PQ 16x"]
    chunks = sum((live & 3).bit_count() for live, _ in rows.values())
    assert copies.bytes(plain) == 16 * chunks + 16 * len(rows)
    assert copies.bytes(coded) == chunks + 16 * len(rows) + 2 * DIM * CODEWORDS
    assert coded.sent[-1] < plain.sent[-1]
    assert plain.differing[-1] <= plain.sent[-1]


@pytest.mark.long
def test_forms_are_rated_against_fp32_of_the_same_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    columns: dict[str, Any] = {name: rng.integers(1, 900, 4000) for name in KEYS}
    columns["ts"] = np.sort(rng.integers(0, 86_400, 4000))
    columns["y"] = (columns["cand"] % 3 == 0).astype(np.int64)
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    stream = Stream(path=tmp_path / "clicks.parquet", days=(0, 0), seen_by="cand")
    monkeypatch.setattr(quantised, "outcomes", _in_process)
    monkeypatch.setattr(quantised, "_FEWEST", CODEWORDS)
    monkeypatch.setattr(quantised, "_CURVE", tmp_path / "curve.svg")
    rows = {(row.case, row.metric): row for row in quantised.run(stream, [1], 1)}
    loss = rows["DLRM, PQ 8x", "log loss"]
    assert (loss.peer_name, loss.claim, loss.target) == ("fp32", "F.4", 1.001)
    assert loss.spread == 0  # of one seed
    size = {name: rows[f"DLRM, {name}", "bytes of rows at the end"] for name in ("fp16", "int4")}
    assert size["fp16"].ratio == 0.5
    assert size["int4"].ratio == round(12 / 64, 5)
    assert rows["DLRM, fp16", "log loss"].ratio == pytest.approx(1, abs=1e-4)
    assert (tmp_path / "curve.svg").stat().st_size
