"""Every model: shapes, gradients, meta device, float64, torch.compile, and messages."""

from typing import Any

import pytest
import torch
from torch import nn

from manta.errors import MantaError
from manta.models.cnn import CNN
from manta.models.mlp import MLP
from manta.models.resnet import resnet18
from manta.models.vit import ViT
from manta.targets import build

SHAPES = {"digits": [1, 8, 8], "cifar": [3, 32, 32]}
SPECS: dict[str, dict[str, Any]] = {
    "mlp": {"_target_": "manta.models.mlp.MLP", "hidden": [16, 12], "dropout": 0.1},
    "cnn": {"_target_": "manta.models.cnn.CNN", "channels": [4, 8], "hidden": 16, "dropout": 0.1},
    "resnet18": {"_target_": "manta.models.resnet.resnet18"},
    "vit": {"_target_": "manta.models.vit.ViT", "patch_size": 4, "dim": 16, "depth": 2, "heads": 2, "dropout": 0.1},
}


def make(name: str, shape: list[int], classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    model = build("model", {**SPECS[name], "input_shape": shape, "num_classes": classes}, ["manta"])
    assert isinstance(model, nn.Module)
    return model


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_and_gradients_reach_every_parameter(name, shape):
    model = make(name, shape, classes=7)
    logits = model(torch.randn(2, *shape))
    assert logits.shape == (2, 7) and logits.dtype == torch.float32
    nn.functional.cross_entropy(logits, torch.tensor([1, 6])).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.parametrize("name", ["mlp", "vit", "cnn"])
def test_batch_of_one_in_training_mode(name):
    assert make(name, [1, 8, 8]).train()(torch.randn(1, 1, 8, 8)).shape == (1, 10)


@pytest.mark.parametrize("name", ["mlp", "vit", "cnn"])
def test_a_sample_does_not_depend_on_its_batch(name):
    """What makes the loss curve the same for every number of workers."""
    model, batch = make(name, [1, 8, 8]).double().eval(), torch.randn(5, 1, 8, 8, dtype=torch.float64)
    alone = torch.cat([model(sample[None]) for sample in batch])
    torch.testing.assert_close(model(batch), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SPECS)
def test_builds_on_meta_and_loads_real_weights(name):
    real = make(name, [1, 8, 8]).eval()
    with torch.device("meta"):
        shell = make(name, [1, 8, 8]).eval()
    assert all(p.is_meta for p in shell.parameters())
    shell.to_empty(device="cpu").load_state_dict(real.state_dict())
    inputs = torch.randn(3, 1, 8, 8)
    assert torch.equal(shell(inputs), real(inputs))


@pytest.mark.parametrize("name", SPECS)
def test_double_precision(name):
    single, inputs = make(name, [1, 8, 8]).eval(), torch.randn(3, 1, 8, 8)
    low = single(inputs)
    high = single.double()(inputs.double())
    assert high.dtype == torch.float64
    torch.testing.assert_close(low.double(), high, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SPECS)
def test_compiles_without_graph_breaks(name):
    model, inputs = make(name, [1, 8, 8]).eval(), torch.randn(2, 1, 8, 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs), model(inputs))


def test_sizes():
    def count(model):
        return sum(p.numel() for p in model.parameters())

    assert count(MLP([1, 8, 8], 10, hidden=[256, 128])) == 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10
    assert count(MLP([5], 3, hidden=[])) == 18  # no hidden layer: logistic regression
    assert count(resnet18([3, 32, 32], 10)) == 11_173_962  # the well-known size of the CIFAR ResNet-18
    assert resnet18([3, 32, 32], 10).layer4[1].conv2.weight.std() > 0


def test_resnet_keeps_the_resolution_of_small_images():
    model, seen = resnet18([3, 32, 32], 10), []
    for stage in (model.layer1, model.layer4):
        stage.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape[2:])))
    model(torch.randn(2, 3, 32, 32))
    assert seen == [(32, 32), (4, 4)]


def test_vit_blocks_start_different():
    """torch.nn.TransformerEncoder would copy one block's weights into all."""
    blocks = ViT([1, 8, 8], 10, patch_size=4, depth=2).blocks
    assert not torch.equal(blocks[0].qkv.weight, blocks[1].qkv.weight)


def test_vit_attention_is_softmax_attention():
    block = ViT([1, 8, 8], 10, patch_size=4, dim=8, heads=2, depth=1).double().eval().blocks[0]
    tokens = torch.randn(2, 4, 8, dtype=torch.float64)
    q, k, v = block.qkv(tokens).chunk(3, dim=-1)
    heads = [
        ((q[..., s] @ k[..., s].mT) / 2).softmax(-1) @ v[..., s]  # sqrt(dim / heads) = 2
        for s in (slice(0, 4), slice(4, 8))
    ]
    torch.testing.assert_close(block.attend(tokens), block.out(torch.cat(heads, -1)))


def test_vit_positions_and_dropout_matter():
    model = ViT([1, 8, 8], 10, patch_size=4, dropout=0.5)
    image = torch.randn(1, 1, 8, 8)
    swapped = image.roll(4, dims=-1)  # swaps left and right patches
    assert not torch.allclose(model.eval()(image), model(swapped))
    assert not torch.equal(model.train()(image), model(image))
    assert torch.equal(model.eval()(image), model(image))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: MLP([1, 8, 8], 0, hidden=[4]), "num_classes=0"),
        (lambda: MLP([1, 8, 8], 10, hidden=[4, 0]), r"hidden\[1\]=0"),
        (lambda: MLP([], 10, hidden=[4]), r"input_shape=\[\]"),
        (lambda: MLP([1, 8, 8], 10, hidden=[4], dropout=1.0), "dropout=1.0"),
        (lambda: CNN([64], 10, channels=[4]), r"input_shape=\[64\]"),
        (lambda: CNN([1, 8, 8], 10, channels=[4] * 4), r"channels=\[4, 4, 4, 4\]"),
        (lambda: CNN([1, 8, 8], 10, channels=[4], hidden=0), "hidden=0"),
        (lambda: resnet18([64], 10), r"input_shape=\[64\]"),
        (lambda: resnet18([1, 8, 8], 0), "num_classes=0"),
        (lambda: ViT([1, 28, 28], 10, patch_size=5), "patch_size=5 does not divide"),
        (lambda: ViT([1, 8, 8], 10, patch_size=0), "patch_size=0"),
        (lambda: ViT([1, 8, 8], 10, patch_size=4, dim=10, heads=4), "dim=10 is not a multiple of heads=4"),
        (lambda: ViT([1, 8, 8], 10, patch_size=4, mlp_ratio=0.0), "mlp_ratio"),
        (lambda: ViT([1, 8, 8], 10, patch_size=4, dropout=-0.1), "dropout=-0.1"),
    ],
)
def test_bad_values_name_their_argument(call, argument):
    with pytest.raises(ValueError, match=argument):
        call()


def test_bad_types_are_found_from_annotations():
    spec = {**SPECS["vit"], "input_shape": [1, 8, 8], "num_classes": 10, "depth": "four"}
    with pytest.raises(MantaError, match=r"model.depth='four'"):
        build("model", spec, ["manta"])
