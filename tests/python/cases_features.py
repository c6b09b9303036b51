"""What an unmodified module and its program do beside forward, backward and step."""

import copy
import io
import os
import pickle

import torch
from torch import nn

import support
import zeroth
from support import case, raises


class Net(nn.Module):
    """Small, with a buffer, a tied weight and a custom function."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)
        self.norm, self.last = nn.BatchNorm1d(32), nn.Linear(32, 4)
        self.tied = nn.Linear(32, 32, bias=False)
        self.tied.weight = self.second.weight

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(self.norm(self.tied(self.second(x))))


def net():
    torch.manual_seed(0)
    return Net()


def inputs(step, micro):
    generator = torch.Generator().manual_seed(step * 1000 + micro)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def loss_of(model):
    def loss(step, micro):
        x, y = inputs(step, micro)
        return nn.functional.mse_loss(model(x), y)

    return loss


def without_norm():
    """As net(), without running statistics, which each rank computes of its own batches."""
    model = net()
    model.norm = nn.Identity()
    return model


@case
def ordinary_module():
    support.assert_same(support.trained(without_norm, loss_of), support.plain(without_norm, loss_of))


@case
def hooks():
    def make(seen):
        model = without_norm()
        model.first.weight.register_hook(lambda gradient: seen.append("tensor") or gradient * 2)
        model.last.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad is not None))
        model.second.register_full_backward_hook(lambda module, given, wanted: seen.append("module"))
        model.second.register_forward_pre_hook(lambda module, given: seen.append("before"))
        model.second.register_forward_hook(lambda module, given, result: seen.append("after"))
        return model

    ours, theirs = [], []
    got = support.trained(lambda: make(ours), loss_of)
    support.assert_same(got, support.plain(lambda: make(theirs), loss_of))
    ranks = zeroth.Program(support.config()).world
    assert len(ours) * ranks == len(theirs) and sorted(set(map(str, ours))) == sorted(set(map(str, theirs))), ours


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


@case
def functions_of_python_on_a_weight():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = without_norm(), nn.Parameter(torch.ones(4))

        def forward(self, x):
            return Scale.apply(self.inner(x), self.scale)

    for options in ({}, {"offload.tiers": "cpu", "offload.activations": "cpu"}):
        support.assert_same(support.trained(Scaled, loss_of, **options), support.plain(Scaled, loss_of))


@case
def double_backward():
    def penalty_of(model):
        def loss(step, micro):
            x, y = inputs(step, micro)
            x.requires_grad_()
            value = nn.functional.mse_loss(model(x), y)
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            return value + gradient.pow(2).sum()

        return loss

    support.assert_same(support.trained(without_norm, penalty_of), support.plain(without_norm, penalty_of))


@case
def hooks_of_saved_tensors_and_anomaly_mode():
    def loss_with_hooks(counts):
        def of(model):
            def loss(step, micro):
                def pack(tensor):
                    counts[0] += 1
                    return tensor.clone()

                def unpack(tensor):
                    counts[1] += 1
                    return tensor

                with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                    return loss_of(model)(step, micro)

            return loss

        return of

    plain_counts = [0, 0]
    wanted = support.plain(without_norm, loss_with_hooks(plain_counts))
    ranks = zeroth.Program(support.config()).world
    for options in ({}, {"offload.tiers": "cpu", "offload.activations": "cpu"}):
        counts = [0, 0]
        support.assert_same(support.trained(without_norm, loss_with_hooks(counts), **options), wanted)
        assert [ranks * count for count in counts] == plain_counts, (counts, plain_counts)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        support.assert_same(support.trained(without_norm, loss_of), support.plain(without_norm, loss_of))


@case
def parametrizations():
    def make():
        model = without_norm()
        nn.utils.parametrizations.weight_norm(model.first)
        nn.utils.parametrizations.spectral_norm(model.last)
        return model

    got = support.trained(make, loss_of)
    assert set(got) == set(dict(make().named_parameters()))

    def weight_norm_only():
        model = without_norm()
        nn.utils.parametrizations.weight_norm(model.first)
        return model

    support.assert_same(support.trained(weight_norm_only, loss_of), support.plain(weight_norm_only, loss_of))


@case
def an_exception_in_backward_arrives_as_itself():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise LookupError("of the program")

    model = without_norm()
    with support.engine_of(model) as engine:
        loss = loss_of(model)
        with raises(LookupError, "of the program"):
            engine.backward(Bad.apply(loss(0, engine.micro_index)))
        support.steps_of(engine, loss)
        support.assert_same(support.weights_of(engine, model), support.plain(without_norm, loss_of))


@case
def callbacks_and_their_exceptions():
    model, seen = without_norm(), []
    with support.engine_of(model, **{"train.steps": 6}) as engine:
        loss = loss_of(model)
        engine.set_schedule(lambda index: 1e-3 * (index + 1))
        engine.on_step(lambda result: seen.append((result.step, result.learning_rate)))
        support.steps_of(engine, loss, 2)
        assert seen == [(1, 1e-3), (2, 2e-3)], seen

        def fail(*arguments):
            raise LookupError("in a callback")

        engine.set_schedule(fail)
        with raises(LookupError, "in a callback"):
            support.steps_of(engine, loss, 1)
        engine.set_schedule(None)
        engine.step()  # the step that the exception has kept from ending
        before = engine.get("first.weight")
        edited = []

        def clip(name, gradient, first):
            edited.append((name, first, gradient.numel()))
            gradient.clamp_(-1e-3, 1e-3)

        engine.edit_gradients(clip)
        support.steps_of(engine, loss, 1)
        assert edited and all(size > 0 for _, _, size in edited)
        assert engine.get("first.weight", "gradient").abs().max() <= 1e-3
        assert not torch.equal(before, engine.get("first.weight"))
        engine.edit_gradients(fail)
        with raises(LookupError, "in a callback"):
            support.steps_of(engine, loss, 1)
        engine.edit_gradients(None)
        engine.set_lr(5e-4)
        support.steps_of(engine, loss, 1)
        assert engine.last_step.learning_rate == 5e-4
        engine.on_step(fail)
        with raises(LookupError, "in a callback"):
            support.steps_of(engine, loss, 1)


@case
def weights_of_micro_batches():
    """Two micro-batches with 3 and 1 tokens: the gradient is that of the mean over all tokens."""
    model = without_norm()
    with support.engine_of(model) as engine:
        support_loss, weights = loss_of(model), [3, 1]
        while not engine.done:
            micro = engine.micro_index
            engine.backward(support_loss(engine.step_index, micro), weight=torch.tensor(weights[micro]))
            if engine.step():
                break
        got = engine.get("first.weight", "gradient")
    reference = without_norm()
    loss = loss_of(reference)
    ((3 * loss(0, 0) + loss(0, 1)) / 4).backward()
    assert torch.allclose(got, reference.first.weight.grad, rtol=1e-5, atol=1e-8)


@case
def evaluation_swap_and_gather():
    model = net()
    with support.engine_of(model) as engine:
        support.steps_of(engine, loss_of(model))
        random = torch.get_rng_state()
        digest, x = engine.weights_hash(), inputs(9, 0)[0]
        with engine.evaluation():
            assert not torch.is_grad_enabled()
            torch.rand(3)
            before = model.eval()(x)
        assert torch.is_grad_enabled() and torch.equal(random, torch.get_rng_state())
        zeros = {"last.weight": torch.zeros(4, 32), "last.bias": torch.full((4,), 2.0)}
        for values in (zeros, zeros.get):
            with engine.swap(values), engine.evaluation():
                assert torch.equal(model(x), torch.full((8, 4), 2.0))
        with engine.evaluation():
            assert torch.equal(model(x), before)
        assert engine.weights_hash() == digest
        with zeroth.gather(model.parameters()):
            array = model.last.weight.detach().numpy()
            assert array.shape == (4, 32) and model.last.weight.data_ptr() != 0
        assert torch.equal(torch.from_numpy(array.copy()), engine.get("last.weight")) or engine.world > 1
        with zeroth.gather(model.last.bias), torch.no_grad():
            model.last.bias.fill_(7)
        assert torch.equal(engine.get("last.bias"), torch.full((4,), 7.0))
        with raises(zeroth.UserError, "the model has no parameter 'lost'"):
            engine.swap({"lost": torch.ones(1)})
        with raises(LookupError), engine.evaluation():
            raise LookupError


@case
def state_dictionaries():
    model = net()
    with support.engine_of(model) as engine:
        support.steps_of(engine, loss_of(model))
        state = engine.state_dict()
        assert list(state) == list(net().state_dict())
        assert torch.equal(state["second.weight"], state["tied.weight"])
        again = net()
        again.load_state_dict(state)
        assert torch.equal(again.last.weight, engine.get("last.weight"))
        assert torch.equal(again.norm.running_mean, engine.buffer("norm.running_mean"))
        only = engine.state_dict(rank0_only=True)
        assert len(only) == (len(state) if engine.rank == 0 else 0)
        engine.load_state_dict(net().state_dict())
        assert torch.equal(engine.get("first.weight"), net().first.weight)
        assert torch.equal(engine.buffer("norm.running_mean"), net().norm.running_mean)
        with raises(zeroth.UserError, "missing: first.weight, first.bias", "not in the model: x", "strict=False"):
            engine.load_state_dict({"x": torch.ones(1)})
        missing, unexpected = engine.load_state_dict({"x": torch.ones(1), "last.bias": torch.ones(4)}, strict=False)
        assert unexpected == ["x"] and "last.bias" not in missing
        assert torch.equal(engine.get("last.bias"), torch.ones(4))
        plain_state = model.state_dict()  # of the module itself, through operators
        assert torch.equal(plain_state["first.weight"].clone(), engine.get("first.weight"))
        model.load_state_dict(state)
        assert torch.equal(engine.get("first.weight"), state["first.weight"])


@case
def pointers_of_sharded_weights():
    """The right value, or an error that names the remedy."""
    model = net()
    with support.engine_of(model) as engine:
        weight = model.second.weight
        assert "Parameter" in repr(weight) and repr(model)
        assert weight.norm().item() > 0 and weight[0, 0].item() == engine.get("second.weight")[0, 0].item()
        assert torch.equal(weight.detach().clone(), engine.get("second.weight"))
        assert torch.equal(copy.deepcopy(model).second.weight, engine.get("second.weight"))
        calls = {
            "numpy": lambda: weight.detach().numpy().copy(),
            "tolist": lambda: weight.tolist(),
            "data_ptr": lambda: weight.data_ptr(),
            "torch.save": lambda: torch.save(model.state_dict(), io.BytesIO()),
            "pickle": lambda: pickle.dumps(model),
        }
        for call in calls.values():
            try:
                call()
            except RuntimeError as error:
                assert "zeroth.gather(" in str(error), error
                assert "zr::" not in str(error)
        with zeroth.gather(model.parameters()):
            for call in calls.values():
                call()


@case
def conversions_that_change_nothing():
    model = net()
    with support.engine_of(model) as engine:
        support.steps_of(engine, loss_of(model), 1)
        digest = engine.weights_hash()
        for convert in (model.cpu, model.float, lambda: model.to("cpu"), lambda: model.to(torch.float32), model.train):
            convert()
        assert engine.weights_hash() == digest
        support.steps_of(engine, loss_of(model))


@case
def checkpoints_and_the_loader():
    data = [inputs(7, index) for index in range(10)]

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)

        def __getitem__(self, index):
            return index, data[index][0], data[index][1]

    def run(engine, model, seen, workers=0):
        for index, x, y in engine.loader(Data(), num_workers=workers):
            seen.append((engine.step_index, engine.micro_index, int(index[0])))
            engine.backward(nn.functional.mse_loss(model(x[0]), y[0]))
            if engine.step() and engine.step_index == 2:
                engine.save("loader_checkpoints")

    model, seen = without_norm(), []
    options = {"train.steps": 8, "checkpoint.keep": 1}
    with support.engine_of(model, **options) as engine:
        run(engine, model, seen)
        digest, ranks = engine.weights_hash(), engine.world
    for strategy, workers in (("zero3", 0), ("zero1", 2)):
        model, again = without_norm(), []
        with support.engine_of(model, strategy, **options) as engine:
            report = engine.load("loader_checkpoints")
            assert engine.step_index == 2 and not report.missing and os.path.isdir(report.folder)
            for index, x, y in engine.loader(Data(), num_workers=workers):
                again.append((engine.step_index, engine.micro_index, int(index[0])))
                engine.backward(nn.functional.mse_loss(model(x[0]), y[0]))
                engine.step()
            assert engine.weights_hash() == digest
        assert again == [row for row in seen if row[0] >= 2]
    # Every sample once per epoch, over all ranks.
    assert len({index for step, _, index in seen if step < 5}) == (10 if ranks == 1 else 5)
    with support.engine_of(without_norm()) as engine, raises(zeroth.UserError, "train.micro_batch"):
        engine.loader(Data(), batch_size=4)
    with support.engine_of(without_norm()) as engine, raises(zeroth.UserError, "the dataset is empty"):
        engine.loader([])


@case
def frozen_added_and_replaced_parameters():
    def change(model):
        model.last = nn.Linear(32, 4)
        model.extra = nn.Parameter(torch.ones(4))
        with torch.no_grad():
            model.last.weight.fill_(0.01)
            model.last.bias.zero_()

    model = without_norm()
    model.first.requires_grad_(False)
    with support.engine_of(model) as engine:
        first = engine.get("first.weight")
        support.steps_of(engine, loss_of(model), 1)
        assert torch.equal(first, engine.get("first.weight"))
        change(model)
        with raises(zeroth.UserError, "engine.refresh()"):
            engine.backward(loss_of(model)(1, engine.micro_index))
        engine.refresh()
        assert "extra" in {info.name for info in engine.parameters()}
        support.steps_of(engine, lambda s, m: loss_of(model)(s, m) + (model.extra**2).sum())
        assert not torch.equal(engine.get("extra"), torch.ones(4))
        assert not torch.equal(engine.get("last.weight"), torch.full((4, 32), 0.01))


@case
def two_engines_of_a_gan():
    def make():
        torch.manual_seed(0)
        return nn.Linear(8, 16), nn.Linear(16, 1)

    def play(generator, critic, step_critic, step_generator, micro_of, accumulate):
        for step in range(3):
            for micro in micro_of():
                noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 10 + micro))
                step_critic(critic(generator(noise).detach()).pow(2).mean())
            for micro in micro_of():
                noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 10 + micro))
                for parameter in critic.parameters():
                    parameter.requires_grad_(False)
                step_generator(critic(generator(noise)).mean())
                for parameter in critic.parameters():
                    parameter.requires_grad_(True)

    import reference

    generator, critic = make()
    with support.engine_of(generator) as g, support.engine_of(critic) as c:

        def step_of(engine):
            def step(loss):
                engine.backward(loss)
                engine.step()

            return step

        micros = [m for m in range(2) if m % g.world == g.rank]
        play(generator, critic, step_of(c), step_of(g), lambda: micros, None)
        got = {**support.weights_of(g, generator), **{f"c.{n}": t for n, t in support.weights_of(c, critic).items()}}

    generator, critic = make()
    optimizers = {id(model): reference.AdamW() for model in (generator, critic)}

    def plain_step(model):
        counted = [0]

        def step(loss):
            loss.backward()
            counted[0] += 1
            if counted[0] % 2 == 0:
                for parameter in model.parameters():
                    parameter.grad /= 2
                optimizers[id(model)].step(model.parameters())
                model.zero_grad()

        return step

    play(generator, critic, plain_step(critic), plain_step(generator), lambda: range(2), None)
    wanted = {n: p.detach() for n, p in generator.named_parameters()}
    wanted.update({f"c.{n}": p.detach() for n, p in critic.named_parameters()})
    support.assert_same(got, wanted)


@case
def models_of_one_step():
    """BERT, ViT and Whisper: one step each, the bits of the reference."""
    import transformers

    def bert():
        config = transformers.BertConfig(
            vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
        return transformers.BertForMaskedLM(config), lambda g: {
            "input_ids": torch.randint(0, 99, (2, 8), generator=g),
            "labels": torch.randint(0, 99, (2, 8), generator=g),
        }

    def vit():
        config = transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=8,
            num_labels=3,
        )
        return transformers.ViTForImageClassification(config), lambda g: {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=g),
            "labels": torch.randint(0, 3, (2,), generator=g),
        }

    def whisper():
        config = transformers.WhisperConfig(
            vocab_size=99,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
        return transformers.WhisperForConditionalGeneration(config), lambda g: {
            "input_features": torch.randn(2, 8, 20, generator=g),
            "labels": torch.randint(3, 99, (2, 6), generator=g),
        }

    for build in (bert, vit, whisper):
        batches = build()[1]

        def make(build=build):
            torch.manual_seed(0)
            return build()[0].train()

        def of(model, batches=batches):
            return lambda s, m: model(**batches(torch.Generator().manual_seed(10 * s + m))).loss

        support.assert_same(support.trained(make, of, **{"train.steps": 3}), support.plain(make, of))
