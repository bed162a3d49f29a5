"""Damaged files of gefen-x are refused in words that name the place, and are not written to."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters._legacy import is_gefen_x
from tests.unit.test_legacy import checkpoint, convert
from tests.unit.test_legacy_ranks import Edit, pack, unpack

GONE = object()
GROUP = ("param_groups", 0)
META = (*GROUP, "_gefen_checkpoint_metadata")
MANIFEST = "gefen_muon_distributed"
FIRST = "parameter 0 (lin.weight)"


def put(*path: Any, to: Any) -> Edit:
    """Set what lies at a path; to GONE removes it."""

    def edit(value: Any) -> None:
        *parents, last = path
        for key in parents:
            value = value[key]
        if to is GONE:
            del value[last]
        else:
            value[last] = to

    return edit


def both(*edits: Edit) -> Edit:
    def edit(value: Any) -> None:
        for each in edits:
            each(value)

    return edit


def on_rank(rank: int, edit: Edit) -> Edit:
    def repacked(value: Any) -> None:
        payload = unpack(value, rank)
        edit(payload)
        pack(value, rank, payload)

    return repacked


def state(key: str, to: Any, param: int = 0) -> Edit:
    return put("state", param, key, to=to)


def on_second(*path: Any, to: Any) -> Edit:
    """Set what the second of two ranks saved."""
    return on_rank(1, put(*path, to=to))


def codebook(to: Any) -> Edit:
    return both(put("gefen_codebook", to=to), put(*META, "codebook", to=to))


def edited(name: str, edit: Edit) -> Any:
    given = checkpoint(name)
    edit(given)
    return given


def levels(**changes: float) -> Tensor:
    found = torch.linspace(-1, 1, 256)
    for place, value in changes.items():
        found[int(place[1:])] = value
    return found


NAN = torch.full((6, 1), float("nan"))
INF = torch.full((6, 1), float("inf"))
OLDER = {"version": 1, "ownership": "stable_full_param_index_v1", "consolidated": True}
REFUSED = {
    "gefen_factored": [
        (codebook(None), f"{FIRST}: expected a codebook beside its m_codebook, got none"),
        (codebook(levels().mul(0.5)), "gefen_codebook: a codebook goes from -1 to 1"),
        (codebook(levels(_3=0.5)), "gefen_codebook: the levels of a codebook ascend"),
        (codebook(levels(_3=float("nan"))), "gefen_codebook: a codebook is finite"),
        (codebook(levels().double()), "gefen_codebook: a codebook is torch.float32"),
        (put("gefen_codebook", to=levels()), "gefen_codebook: expected equal copies in all groups"),
        (put("gefen_global_step", to=4), "gefen_global_step: expected one number, got [3, 4]"),
        (put(*META, "format_version", to=4), "format_version: Input should be 1, 2 or 3, got 4"),
        (put("state", to=[]), "state: Input should be a valid dictionary, got a list of 0"),
        (put("state", 9, to={"name": "x"}), "parameter 9: expected a group to list it"),
        (put(*GROUP, "params", to=[0, 1, 2, 2]), "parameter 2 (scale): expected it to be listed"),
        (put(*GROUP, "params", to=[0, 1, 2, True]), "param_groups.0.params.3."),
        (put(*GROUP, "param_names", to=["a"]), "group 0: expected 4 param_names, one for each id"),
        (put(*GROUP, "beta2", to=GONE), "param_groups: expected beta1 and beta2 in each group"),
        (state("name", "wide.weight"), f"{FIRST}: expected the state of 'lin.weight', got that of"),
        (state("m_codebook", GONE), f"{FIRST}: m_codebook: missing"),
        (state("m_codebook", 7), f"{FIRST}: m_codebook: Input should be an instance of Tensor"),
        (
            state("m_codebook", torch.zeros(6, 32)),
            "m_codebook: expected uint8 (n, 32), got a torch.f",
        ),
        (
            state("m_codebook", torch.zeros(192, dtype=torch.uint8)),
            "m_codebook: expected uint8 (n, 32)",
        ),
        (state("m_codebook", torch.zeros(0, 32, dtype=torch.uint8)), "m_codebook: expected uint8"),
        (state("automatic_period", 31), "m_codebook: expected uint8 (n, 31)"),
        (
            state("automatic_period", 0),
            "automatic_period: Input should be greater than or equal to 1",
        ),
        (state("m_magnitude", NAN), f"{FIRST}: m_magnitude: expected finite values from 0 on"),
        (state("m_magnitude", -torch.ones(6, 1)), "m_magnitude: expected finite values from 0 on"),
        (
            state("m_magnitude", torch.ones(5, 1)),
            "m_magnitude: expected float32 (6, 1), got a torch",
        ),
        (state("m_magnitude", torch.ones(6)), "m_magnitude: expected float32 (6, 1)"),
        (state("m_magnitude", torch.ones(6, 1).half()), "m_magnitude: expected float32 (6, 1)"),
        (state("v_row", GONE), f"{FIRST}: expected v_row and v_col, got one of them"),
        (state("v_col", torch.ones(15)), f"{FIRST}: expected v_row * v_col of 192, got 12 * 15"),
        (
            state("v_row", torch.ones(12, 1)),
            "v_row: expected float32 (n), got a torch.float32 tensor",
        ),
        (
            state("v_row", torch.tensor(1.0)),
            "v_row: expected float32 (n), got a torch.float32 tensor",
        ),
        (both(state("v_row", GONE), state("v_col", GONE)), "expected v_row beside factored_step"),
        (state("vmean", GONE, 2), "parameter 2 (norm.bias): expected vmean beside vmean_step"),
        (
            both(state("vmean", GONE, 2), state("vmean_step", GONE, 2)),
            "parameter 2 (norm.bias): expected a second moment (vmean, or v_row and v_col)",
        ),
        (state("vmean", -torch.ones(1, 1), 2), "vmean: expected finite values from 0 on"),
        (state("step", 0), f"{FIRST}: step: Input should be greater than or equal to 1, got 0"),
        (state("step", 2.5), "step: Input should be a valid integer, got 2.5"),
        (state("step", torch.tensor(float("inf"))), "step: Input should be a valid integer"),
        (state("factored_step", True), "factored_step: Input should be a valid integer, got True"),
        (state("exp_avg", torch.ones(1)), f"{FIRST}: exp_avg: not known to gefen-x 0.5"),
        (state("step", torch.tensor(True)), "step: Input should be a valid integer"),
        (state("m_magnitude", INF), "m_magnitude: expected finite values from 0 on"),
        (state("normuon_step", 3), "expected normuon_v and normuon_step, got one of them"),
        (
            both(state("normuon_step", 3), state("normuon_v", torch.ones(12, 1))),
            f"{FIRST}: expected no normuon_v outside a GefenMuon",
        ),
    ],
    "muon_normuon": [
        (state("normuon_step", GONE), f"{FIRST}: expected normuon_v and normuon_step, got one of"),
        (state("normuon_v", torch.ones(12)), "normuon_v: expected float32 (n, 1)"),
        (state("normuon_v", torch.ones(0, 1)), "normuon_v: 0 rows do not divide 192"),
        (state("vmean", torch.ones(6, 1)), f"{FIRST}: expected no vmean, v_row or v_col in a"),
        (state("normuon_v", torch.ones(7, 1)), "normuon_v: 7 rows do not divide 192"),
        (
            put(*GROUP, "ns_coefficients", to=GONE),
            "expected ns_coefficients in each group, got None",
        ),
    ],
    "muon_distributed": [
        (
            put("state", 1, to={"name": "tall.weight"}),
            "parameter 1 (tall.weight): expected the state",
        ),
        (put(MANIFEST, "version", to=3), "version: Input should be 1 or 2, got 3"),
        (put(MANIFEST, "consolidated", to=False), "consolidated: Input should be True, got False"),
        (
            # torch.load keeps the copy in the group the same object.
            put(MANIFEST, "groups", 0, "world_size", to=3),
            "parameter 2 (wide.weight): expected owner 2 in the manifest, got 0",
        ),
        (
            put(MANIFEST, to=OLDER),
            "param_groups: expected the owner manifest to be the same in all",
        ),
        (
            both(
                put(MANIFEST, to=GONE),
                put(*META, "muon_distributed_state", to=GONE),
                put("state", 1, to={"name": "tall.weight"}),
            ),
            "parameter 1 (tall.weight): expected the state that its owner has, got none, and",
        ),
        (
            both(
                put(MANIFEST, to=OLDER),
                put(*META, "muon_distributed_state", to=OLDER),
                put("state", 1, to={"name": "tall.weight"}),
            ),
            "parameter 1 (tall.weight): expected the state that its owner has, got none, and",
        ),
    ],
    "muon_mixed": [
        (
            put(MANIFEST, "groups", 0, "params", 0, "owner", to=1),
            "parameter 2 (wide.weight): expected owner 0 in the manifest, got 1",
        ),
    ],
    "hybrid_adamw": [
        (
            put("backup_optimizer", to="sgd"),
            'backup_optimizer: expected "gefen" or "adamw", got \'sgd\'',
        ),
        (
            put("backup_optimizer", to="gefen"),
            "backup half, gefen_global_step: expected one number",
        ),
        (both(put("muon", to=None), put("backup", to=None)), "expected a Muon half, a backup half"),
        (put("muon", to=[]), "Muon half, state_dict: Input should be a valid dictionary"),
        (
            put("muon", "state", 0, "m_magnitude", to=None),
            f"Muon half, {FIRST}: m_magnitude: Input",
        ),
        (
            put("muon", "param_groups", 0, "params", to=[1, 2]),
            "Muon half, parameter 0: expected a gr",
        ),
        (
            put("backup", "state", 0, "exp_avg", to=GONE),
            "backup half, parameter 0 (wte.weight): exp_a",
        ),
        (
            put("backup", "state", 0, "exp_avg", to=1.0),
            "exp_avg: Input should be an instance of Tens",
        ),
    ],
    "gefen_rank_local": [
        (
            put("state", 0, "_gefen_rank_local_payload_1", to=GONE),
            f"{FIRST}: expected the state of 2 ranks, as",
        ),
        (
            put("state", 0, "_gefen_rank_local_payload_1", to=torch.zeros(99, dtype=torch.uint8)),
            f"{FIRST}, rank 1: expected what torch.save wrote, got ",
        ),
        (
            put("state", 0, "_gefen_rank_local_payload_0", to=torch.ones(9)),
            "expected one row of uint8",
        ),
        (
            put(*META, "rank_local_sharded_state", to=None),
            f"{FIRST}: expected the state of 0 ranks, as the metadata of its group says, got 2",
        ),
        (
            put(*META, "rank_local_sharded_state", "format", to="v3"),
            "'rank_local_dtensor_v2', got 'v3",
        ),
        (
            put(*META, "rank_local_sharded_state", "world_size", to=3),
            "of 3 ranks, as the metadata of its group says, got 2; missing are the ranks [2]",
        ),
        (
            on_second("global_step", to=4),
            "rank 1: expected rank, world size and global step (1, 2, 3)",
        ),
        (
            on_second("global_rank", to=0),
            "expected rank, world size and global step (1, 2, 3), got (0",
        ),
        (on_second("signature", to=[]), "expected states and signature of 4, got 4 and 0"),
        (on_second("states", to=[]), "rank 1: expected states and signature of 4, got 0 and 4"),
        (
            on_second("codebook", to=None),
            f"{FIRST}, rank 1: expected a codebook beside its m_codebook",
        ),
        (
            on_second("codebook", to=levels(_0=-2.0)),
            f"{FIRST}, rank 1: codebook: a codebook goes from",
        ),
        (
            on_second("states", 0, to={"name": "lin.weight"}),
            f"{FIRST}, rank 1: expected state, as other",
        ),
        (
            on_second("states", 0, "step", to=4),
            f"{FIRST}: expected equal steps on all ranks",
        ),
        (
            on_second("states", 0, "vmean_step", to=GONE),
            f"{FIRST}: expected equal steps",
        ),
        (
            on_second("states", 0, "m_magnitude", to=-torch.ones(1, 1)),
            f"{FIRST}, rank 1: m_magnitude:",
        ),
        (
            on_second("states", 0, "vmean", to=torch.ones(2, 1)),
            f"{FIRST}, rank 1: vmean: expected floa",
        ),
        (
            on_rank(
                1,
                both(
                    *(
                        put("states", 0, k, to=torch.ones(n))
                        for k, n in (("v_row", 2), ("v_col", 16))
                    )
                ),
            ),
            f"{FIRST}, rank 1: expected vmean alone for a sharded parameter",
        ),
        (
            on_second("signature", 0, "shape", to=[6, 16]),
            "rank 1: expected the shape [5, 16] split by 0",
        ),
        (
            on_second("signature", 0, "local_shape", to=[3, 16]),
            "rank 1: expected state of 48 elements",
        ),
        (
            on_second("signature", 0, "local_shape", to=[4, 8]),
            "rank 1: expected a shard of [5, 16], got",
        ),
        (
            on_second("signature", 0, "coordinate", to=[-1]),
            f"{FIRST}: expected shards of the sizes [3, 2]",
        ),
        (on_second("signature", 0, "coordinate", to=None), "expected a mesh of one axis"),
        (
            on_second("signature", 0, "placements", to=[]),
            "signature.0: expected a mesh of one axis",
        ),
        (
            on_second("signature", 0, "placements", to=[{"type": "_StridedShard", "dim": 0}]),
            "signature.0.placements.0.type: Input should be 'Shard' or 'Replicate', got '_St",
        ),
        (
            on_second("signature", 0, "placements", to=[{"type": "Shard"}]),
            "signature.0: expected the dimension of a Shard, got none",
        ),
        (
            on_second("signature", 0, "placements", 0, "dim", to=2),
            "expected a shard of [5, 16], got [2",
        ),
    ],
    "muon_approx": [
        (
            on_second("states", 0, "normuon_v", to=torch.ones(4, 1)),
            f"{FIRST}, rank 1: expected 2 rows",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "edit", "text"),
    [(name, edit, text) for name, cases in REFUSED.items() for edit, text in cases],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_files_are_refused(name: str, edit: Edit, text: str) -> None:
    given = edited(name, edit)
    assert is_gefen_x(given)
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        convert(given)
    assert str(caught.value).startswith("gefen-x checkpoint, ")
    assert "Save it again with gefen-x 0.5" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"owner": 0}, "parameter 1 (tall.weight): expected owner 1 in the manifest, got 0"),
        ({"saved_id": 7}, "owner manifest: expected each parameter of the file once, got 7"),
        ({"saved_id": 0}, "owner manifest: expected each parameter of the file once, got 0"),
        (
            {"shape": (13, 9)},
            "expected state of the shape (13, 9) in the manifest, got 104 elements",
        ),
        (
            {"state_keys": ("name",)},
            "parameter 1 (tall.weight): expected the state ['name'] of its ow",
        ),
        ({"initialized": False}, "parameter 1 (tall.weight): expected initialized=True"),
    ],
    ids=str,
)
def test_a_manifest_that_does_not_fit_is_refused(change: dict[str, Any], text: str) -> None:
    given = checkpoint("muon_distributed")
    given[MANIFEST]["groups"][0]["params"][1] |= change
    with pytest.raises(ValueError, match=re.escape(text)):
        convert(given)


def test_ids_that_do_not_count_from_zero_cannot_be_merged() -> None:
    given = checkpoint("hybrid_gefen")
    muon = given["muon"]
    muon["param_groups"][0]["params"] = [1, 2]
    muon["state"] = {key + 1: entry for key, entry in muon["state"].items()}
    with pytest.raises(ValueError, match="the two halves: expected parameter ids counted from 0"):
        convert(given)
