"""The peer of `production` in C++: AOTInductor, with the user's part once, written by hand.

`bench/backends/aoti.cc` runs it in Triton, one request at a time: a user's keys once and those of
all candidates. It knows what a compiler would have to find: the first five of the user's features
are bags of one length, the others single keys; of the pairwise products those of the user's own
vectors and their share of the first layer are computed once; the rest is one product of a narrower
matrix a candidate. Keys are row numbers, so it hashes nothing.

Shapes: B candidates, U vectors of the user, C of a candidate, d values a row, N keys of the user.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bench.aoti import TUNED, compiled
from bench.rank.production import production
from embertide.trainer.model.dlrm import Dlrm, Probability

_MOST = 1 << 16
_EXAMPLE = 256
# Products of two inputs have no template.
_WITH_ATEN = {"max_autotune_gemm_backends": "ATEN,CPP"}
FORMS = ("rows", "tuned")
"""As of bench/aoti.py: lookups that AOTInductor fuses, for any number of candidates; the fastest
products that it has, with packed weights. The second is for one number of candidates: with these
choices torch 2.13 makes a program that fails at others."""


class Once(nn.Module):
    """`production` for one user: scores_B1 of USER [1,N] and KEYS [B,C]."""

    def __init__(self, directory: Path, *, users: int, bags: int, bag: int) -> None:
        """Take the weights of a model.

        Args:
            directory: Its tables.npy [F,R,d] and net.safetensors.
            users: Features of the user, which come first.
            bags: How many of them, the first ones, are bags.
            bag: Keys of a bag.
        """
        super().__init__()
        net = Probability(Dlrm(production()))
        net.load_state_dict(load_file(directory / "net.safetensors"))
        top = net.net.top
        assert isinstance(top, nn.Sequential)
        first, *rest = list(top)
        assert isinstance(first, nn.Linear)
        self.rest = nn.Sequential(*rest)
        rows_FRd = np.load(directory / "tables.npy")
        self.features, self.rows, self.dim = rows_FRd.shape
        self.table = nn.Embedding.from_pretrained(torch.from_numpy(rows_FRd.reshape(-1, self.dim)))
        self.users, self.bags, self.bag = users, bags, bag
        candidates = self.features - users
        starts_F = torch.arange(self.features) * self.rows
        of_key = [*(n for n in range(bags) for _ in range(bag)), *range(bags, users)]
        self.register_buffer("user_starts_N", starts_F[torch.tensor(of_key)])
        self.register_buffer("starts_C", starts_F[users:])
        rows, columns = torch.tril_indices(users, users, offset=-1)
        self.register_buffer("user_pairs", rows * users + columns)
        rows, columns = torch.tril_indices(candidates, candidates, offset=-1)
        self.register_buffer("pairs", rows * candidates + columns)
        # Columns of the first layer, by the two vectors that a product is of.
        rows, columns = torch.tril_indices(self.features, self.features, offset=-1)
        seen = self.features * self.dim  # vectors come before the products
        vectors, products = first.weight.detach().split([seen, len(rows)], 1)
        mixed, own = (rows >= users) & (columns < users), columns >= users
        once, each = vectors[:, : users * self.dim], vectors[:, users * self.dim :]
        self.of_user = nn.Parameter(torch.cat([once, products[:, rows < users]], 1).contiguous())
        self.of_candidate = nn.Parameter(
            torch.cat([each, products[:, mixed], products[:, own]], 1).contiguous()
        )
        self.bias = nn.Parameter(first.bias.detach())

    def forward(self, user_1N: Tensor, keys_BC: Tensor) -> Tensor:
        """Return scores_B1."""
        rows_Nd = self.table(user_1N[0] + self.get_buffer("user_starts_N"))
        bags = self.bags * self.bag
        pooled = rows_Nd[:bags].reshape(self.bags, self.bag, self.dim).sum(1)
        user_Ud = torch.cat([pooled, rows_Nd[bags:]])
        products = nn.functional.linear(user_Ud, user_Ud).flatten()[self.get_buffer("user_pairs")]
        once = torch.addmv(self.bias, self.of_user, torch.cat([user_Ud.flatten(), products]))
        candidate_BCd = self.table(keys_BC + self.get_buffer("starts_C"))
        mixed = nn.functional.linear(candidate_BCd, user_Ud)
        own = torch.bmm(candidate_BCd, candidate_BCd.transpose(1, 2)).flatten(1)
        pairs = own[:, self.get_buffer("pairs")]
        each = torch.cat([candidate_BCd.flatten(1), mixed.flatten(1), pairs], 1)
        hidden = each @ self.of_candidate.t() + once
        return torch.sigmoid(self.rest(hidden))


def program(
    directory: Path,
    *,
    users: int,
    bags: int,
    bag: int,
    form: str,
    threads: int,
    candidates: int | None = None,
) -> Path:
    """Return the compiled program, as a folder.

    Args:
        directory: As of `Once`, as are the next three.
        users: Features of the user.
        bags: How many of them are bags.
        bag: Keys of a bag.
        form: One of FORMS.
        threads: Threads of one run.
        candidates: Those of every request, "tuned" alone.
    """
    cpu = torch.backends.cpu.get_cpu_capability().lower()
    keys = bags * bag + users - bags
    own = len(production().features) - users
    example = (
        torch.zeros(1, keys, dtype=torch.int64),
        torch.zeros(candidates or _EXAMPLE, own, dtype=torch.int64),
    )
    return compiled(
        directory / f"once-{form}{candidates or ''}-t{threads}-{cpu}",
        lambda: Once(directory, users=users, bags=bags, bag=bag).eval(),
        example,
        ({}, {} if candidates else {0: torch.export.Dim("batch", min=1, max=_MOST)}),
        threads=threads,
        configs=TUNED | _WITH_ATEN if form == "tuned" else {},
    )
