"""Interactions of users with items: batches with sampled negatives, leave-last-out splits, and synthetic data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.arrays import Ints
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.workloads.data.draws import below, draw
from mpisparse.runtime.workloads.records import Data
from mpisparse.runtime.workloads.split import split_indices

NEGATIVES = 4  # per true pair in training (He et al. 2017, 4.1)
TEST_NEGATIVES = 99  # per true pair in testing


class Unseen:
    """The items each user has not interacted with, numbered without listing them."""

    def __init__(self, users: Ints, items: Ints, user_count: int, item_count: int) -> None:
        self.sizes = user_count, item_count
        order = np.lexsort((items, users))
        users, items = users[order], items[order]
        self._starts = np.searchsorted(users, np.arange(user_count + 1))
        self.counts = item_count - np.diff(self._starts)
        # The number of unseen items below each seen one; with the user as the leading key, all are ascending.
        below_seen = items - (np.arange(len(items)) - self._starts[users])
        self._stride = item_count + 1
        self._keys = users * self._stride + below_seen

    def pick(self, users: Ints, words: NDArray[np.uint64]) -> Ints:
        """Map each random word in a user's row to an unseen item."""
        numbers = below(words, self.counts[users][:, None])
        seen = np.searchsorted(self._keys, users[:, None] * self._stride + numbers, side="right")
        picked: Ints = numbers + seen - self._starts[users][:, None]
        return picked


class RatingExamples:
    """True pairs of a user and an item, each followed by pairs with items the user has not seen."""

    def __init__(self, users: Ints, items: Ints, unseen: Unseen) -> None:
        self._users = users
        self._items = items
        self._unseen = unseen

    def __len__(self) -> int:
        return len(self._users)

    def hold_out(self, count: int, seed: int) -> tuple[RatingExamples, RatingExamples]:
        """Split off `count` pairs at random.

        As with test pairs, a held-out pair may be drawn as a negative in training; otherwise training would reveal it.
        """
        rest, held = split_indices(len(self), count, seed)
        users, items = self._users[rest], self._items[rest]
        train = RatingExamples(users, items, Unseen(users, items, *self._unseen.sizes))
        return train, RatingExamples(self._users[held], self._items[held], self._unseen)

    def batch(self, indices: NDArray[Any], *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pairs (examples, 1 + negatives, 2), the true one first, and targets: 1 for it, 0 for the others."""
        if not train:
            seed = epoch = 0
        negatives = NEGATIVES if train else TEST_NEGATIVES
        users = self._users[indices]
        pairs = np.empty((len(indices), 1 + negatives, 2), np.int64)
        pairs[:, :, 0] = users[:, None]
        pairs[:, 0, 1] = self._items[indices]
        pairs[:, 1:, 1] = self._unseen.pick(users, draw(indices, negatives, seed=seed, epoch=epoch))
        targets = torch.zeros(len(indices), 1 + negatives)
        targets[:, 0] = 1
        return torch.from_numpy(pairs), targets


def rating_data(source: str, users: Ints, items: Ints, user_count: int, item_count: int) -> Data:
    """Use the last pair of every user who has at least two for testing; pairs are distinct and ordered by time."""
    unseen = Unseen(users, items, user_count, item_count)
    if not unseen.counts.all():
        raise ConfigurationError(
            f"{source}: {np.count_nonzero(unseen.counts == 0)} users have all {item_count} items, so there are no"
            " negatives for them; remove these users or add items"
        )
    order = np.argsort(users, kind="stable")
    last = np.append(np.diff(users[order]) != 0, True)
    alone = np.bincount(users, minlength=user_count)[users] == 1
    testing = np.zeros(len(users), bool)
    testing[order[last]] = True
    testing &= ~alone
    if not testing.any():
        raise ConfigurationError(
            f"{source}: expected users with at least two items, one of them to test on, got none; add more rows"
        )
    # In training the test item may be drawn as a negative; leaving it out would reveal it.
    of_train = Unseen(users[~testing], items[~testing], user_count, item_count)
    train = RatingExamples(users[~testing], items[~testing], of_train)
    test = RatingExamples(users[testing], items[testing], unseen)
    return Data(train, test, "ratings", {"users": user_count, "items": item_count})


def synthetic_ratings(users: int = 2000, items: int = 1000, met: int = 25, factors: int = 8) -> Data:
    """Generate users who choose the items nearest to their taste, with noise; in integers, so the same everywhere."""
    tastes, kinds = (
        below(draw(np.arange(count), factors, seed=seed, epoch=0), 17) - 8 for count, seed in ((users, 1), (items, 2))
    )
    likes = tastes @ kinds.T + below(draw(np.arange(users), items, seed=3, epoch=0), 100)
    chosen = np.argsort(-likes, axis=1, kind="stable")[:, :met]
    turns = np.argsort(draw(np.arange(users), met, seed=4, epoch=0), axis=1, kind="stable")
    met_items = np.take_along_axis(chosen, turns, axis=1)
    return rating_data("synthetic-ratings", np.repeat(np.arange(users), met), met_items.ravel(), users, items)
