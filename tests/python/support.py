"""What the cases of cases.py share: a registry, configurations, a training loop, and assertions."""

import contextlib
import copy
import functools
import itertools

import torch

import models
import reference
import zeroth

CASES = {}
_numbers = itertools.count()


def case(function):
    """Registers a case, which every rank of the job runs: it raises AssertionError if something is wrong."""
    CASES[function.__name__] = function
    return function


def config(strategy="zero3", **overrides):
    """A small job: two micro-batches per step, AdamW. With zero3, gathers are real on several ranks."""
    values = {
        "strategy": {"use": strategy, **({"zero3": {"persistence_threshold": 64}} if strategy == "zero3" else {})},
        "optimizer": {"use": "adamw", "lr": 1e-3, "adamw": {"weight_decay": 0.01}},
        "job": {"threads": 1, "name": "cases"},
        "train": {"steps": 3, "global_batch": 2, "micro_batch": 1, "seed": reference.SEED},
        "communicator.share_weights": False,
    }
    return {**values, **overrides}


@contextlib.contextmanager
def engine_of(model, strategy="zero3", name=None, **overrides):
    """An engine that is closed at the end, with a name of its own."""
    name = name or f"e{next(_numbers)}"
    with zeroth.Engine(model, config(strategy, **overrides), name=name) as engine:
        yield engine


def steps_of(engine, loss_of, steps=None):
    """Trains to the end, or `steps` steps; returns their losses."""
    losses = []
    while not engine.done and (steps is None or len(losses) < steps):
        engine.backward(loss_of(engine.step_index, engine.micro_index))
        if engine.step():
            losses.append(engine.last_step.loss)
    return losses


def hf_loss(model, kind="t5"):
    return lambda step, micro: model(**models.batch(kind, step, micro)).loss


def weights_of(engine, model):
    """The trained values, fp32, by name."""
    return {name: engine.get(name) for name, _ in model.named_parameters()}


def trained(make, loss_of, strategy="zero3", **overrides):
    """The weights after training make() with loss_of(model)(step, micro)."""
    model = make()
    with engine_of(model, strategy, **overrides) as engine:
        steps_of(engine, loss_of(model))
        return weights_of(engine, model)


@functools.cache
def plain_weights(kind, dropout=0.0):
    """The weights of the reference loop after three steps."""
    model = models.make(kind, dropout)
    reference.train(model, hf_loss(model, kind))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plain(make, loss_of):
    """The weights of the reference loop for a model of a case."""
    model = make()
    reference.train(model, loss_of(model))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(got, wanted):
    """Every tensor bit for bit."""
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    wrong = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not wrong, f"{len(wrong)} of {len(wanted)} tensors differ, such as {wrong[0]}: " + str(
        (got[wrong[0]] - wanted[wrong[0]]).abs().max().item()
    )


@contextlib.contextmanager
def raises(kind, *words):
    """Asserts that the block raises an exception of this class (not of a subclass), whose text has all `words`."""
    try:
        yield
    except BaseException as error:
        assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
        for word in words:
            assert word in str(error), f"no '{word}' in: {error}"
        return
    raise AssertionError(f"no {kind.__name__}")


def copied(model):
    return copy.deepcopy(model)
