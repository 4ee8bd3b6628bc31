"""A model and data for runs of `mpisparse train`; some data fails on one rank."""

import os
import random
import signal

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """Draws from all three global generators when it trains, and has statistics of its own on every rank."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        if self.training:
            x = x + 0.01 * (random.random() + float(np.random.rand()))
        return self.head(self.body(x))


class Noisy(torch.utils.data.Dataset):
    """Draws its noise from torch's global generator."""

    def __init__(self, count):
        self.inputs = torch.randn(count, 12, generator=torch.Generator().manual_seed(count))
        self.targets = self.inputs[:, :4].argmax(1)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(12), self.targets[index]


class Failing(Noisy):
    asked = 0

    def __getitem__(self, index):
        self.asked += 1
        if self.asked > 60 and os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
            raise OSError("the data of rank 1 is gone")
        return super().__getitem__(index)


class Stopping(Noisy):
    asked = 0

    def __getitem__(self, index):
        self.asked += 1
        if self.asked > 60 and os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


def model():
    return Net(16)


def wide():
    return Net(17)


def data():
    return Noisy(200), Noisy(50)


def failing():
    return Failing(200), Noisy(50)


def stopping():
    return Stopping(200), Noisy(50)


def no_data_on_rank_1(error=FileNotFoundError):
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
        raise error("rank 1 sees no file")
    return data()


def more_on_rank_1():
    rank_1 = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1"
    return Noisy(240 if rank_1 else 200), Noisy(50)


def refused_on_rank_1():
    from mpisparse import ConfigurationError

    return no_data_on_rank_1(ConfigurationError)
