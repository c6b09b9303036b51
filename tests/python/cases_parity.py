"""Bits: the weights of every model are those of the reference loop, under every strategy."""

import torch

import models
import support
from support import case


def model_case(kind, strategy, dropout=0.1):
    def run():
        wanted = support.plain_weights(kind, dropout)
        got = support.trained(lambda: models.make(kind, dropout), lambda model: support.hf_loss(model, kind), strategy)
        support.assert_same(got, wanted)

    run.__name__ = f"{kind}_{strategy}"
    return case(run)


for kind in models.MODELS:
    model_case(kind, "zero3")
for strategy in ("zero0", "zero1", "zero2"):
    model_case("t5", strategy)


@case
def near_torch_optim_adamw():
    model = models.make("t5")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(20):
        optimizer.zero_grad()
        for micro in range(2):
            (support.hf_loss(model)(step, micro) / 2).backward()
        optimizer.step()
    wanted = {name: parameter.detach() for name, parameter in model.named_parameters()}
    got = support.trained(lambda: models.make("t5"), support.hf_loss, **{"train.steps": 20})
    largest = max(value.abs().max().item() for value in wanted.values())
    worst = max((got[name] - wanted[name]).abs().max().item() for name in wanted)
    assert worst <= 1e-5 * largest, (worst, largest)


@case
def deferred():
    import zeroth

    def make():
        torch.manual_seed(0)
        with zeroth.deferred():
            return models.MODELS["t5"](0.1).train()

    support.assert_same(support.trained(make, support.hf_loss), support.plain_weights("t5", 0.1))


@case
def gradient_checkpointing():
    for reentrant in (True, False):
        for tier in ({}, {"offload.tiers": "cpu", "offload.activations": "cpu"}):

            def make(reentrant=reentrant):
                model = models.make("t5", 0.1)
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                return model

            support.assert_same(support.trained(make, support.hf_loss, **tier), support.plain(make, support.hf_loss))


@case
def block_of_zeroth_checkpoint():
    import zeroth

    def loss_of(model):
        def loss(step, micro):
            def block(ids, mask, *, labels):
                return model(input_ids=ids, attention_mask=mask, labels=labels).loss

            batch = models.batch("t5", step, micro)
            return zeroth.checkpoint(block, batch["input_ids"], batch["attention_mask"], labels=batch["labels"])

        return loss

    for tier in ({}, {"offload.tiers": "cpu", "offload.activations": "cpu"}):
        got = support.trained(lambda: models.make("t5", 0.1), loss_of, **tier)
        support.assert_same(got, support.plain_weights("t5", 0.1))


@case
def tiers():
    for part in ("optimizer", "gradients", "parameters"):
        got = support.trained(
            lambda: models.make("t5", 0.1), support.hf_loss, **{"offload.tiers": "cpu", f"offload.{part}": "cpu"}
        )
        support.assert_same(got, support.plain_weights("t5", 0.1))


@case
def sixteen_bits():
    for dtype in ("bf16", "fp16"):
        one, three = (
            support.trained(lambda: models.make("gpt2", 0.1), lambda m: support.hf_loss(m, "gpt2"), strategy,
                            **{"train.dtype": dtype})
            for strategy in ("zero0", "zero3")
        )  # fmt: skip
        support.assert_same(three, one)


@case
def autocast():
    def loss_of(model):
        def loss(step, micro):
            with torch.autocast("cpu", torch.bfloat16):
                return model(**models.batch("t5", step, micro)).loss

        return loss

    support.assert_same(
        support.trained(lambda: models.make("t5"), loss_of), support.plain(lambda: models.make("t5"), loss_of)
    )


@case
def lora():
    import peft

    def make():
        torch.manual_seed(0)
        options = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q", "v"], lora_dropout=0.1)
        model = peft.get_peft_model(models.make("t5"), options).train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    got = support.trained(make, support.hf_loss)
    support.assert_same(got, support.plain(make, support.hf_loss))
    assert all(value.abs().sum() > 0 for name, value in got.items() if "lora_B" in name)


@case
def compiled():
    """Blocks, and the model whole: aot_eager has the bits, inductor is near."""
    import warnings

    import zeroth

    if zeroth.Program(support.config()).world == 1:
        return  # no weights are in shards, so nothing is gathered; compiling takes 20 s

    def blocks_of(backend):
        def make():
            torch._dynamo.reset()
            model = models.make("gpt2")
            for block in model.transformer.h:
                block.compile(backend=backend)
            return model

        return make

    wanted = support.plain_weights("gpt2")

    def loss_of(model):
        return support.hf_loss(model, "gpt2")

    support.assert_same(support.trained(blocks_of("aot_eager"), loss_of), wanted)
    largest = max(value.abs().max().item() for value in wanted.values())

    def assert_near(got):
        worst = max((got[name] - wanted[name]).abs().max().item() for name in wanted)
        assert worst <= 1e-5 * largest, (worst, largest)

    assert_near(support.trained(blocks_of("inductor"), loss_of))

    def whole(model):
        compiled_model = torch.compile(model)
        return lambda step, micro: compiled_model(**models.batch("gpt2", step, micro)).loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch._dynamo.reset()
        assert_near(support.trained(lambda: models.make("gpt2"), whole))
    ours = [w for w in caught if "bytes of the model's parameters" in str(w.message)]
    assert len(ours) == 1, len(ours)
