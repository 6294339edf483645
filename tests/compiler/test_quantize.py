"""Codes must fit the kernel, and calibrated rounding must beat nearest rounding on its inputs."""

import numpy as np
import pytest
import torch

from forerun.compiler.quantize import input_hessian, quantize_weight


def restore(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[K, N] codes and [N] scales back to a float weight [N, K]."""
    return codes.T.float() * scale[:, None]


def saturates(codes: torch.Tensor) -> bool:
    """Whether uint8 inputs exist for which AVX2's vpmaddubsw would clip the codes [K, N].

    It adds the products of the channels 2i and 2i + 1 in 16 bits. The worst inputs are 255 where a
    code has the sum's sign, and 0 where it has not.
    """
    wide = np.pad(codes.numpy().astype(np.int64), ((0, len(codes) % 2), (0, 0))) * 255
    high = wide.clip(min=0).reshape(-1, 2, wide.shape[1]).sum(1)
    low = wide.clip(max=0).reshape(-1, 2, wide.shape[1]).sum(1)
    return bool(high.max() > 2**15 - 1 or low.min() < -(2**15))


def correlated_inputs(tokens: int, channels: int) -> torch.Tensor:
    """Inputs [tokens, channels] that live near few directions, as hidden states do."""
    directions = torch.randn(channels // 4, channels)
    return torch.randn(tokens, channels // 4) @ directions + 0.1 * torch.randn(tokens, channels)


@pytest.mark.parametrize("calibrated", [False, True])
def test_codes_fit_the_kernel(calibrated: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(10, 150) * torch.logspace(-3, 3, 10)[:, None]
    hessian = input_hessian(correlated_inputs(400, 150)) if calibrated else None
    codes, scale = quantize_weight(weight, hessian)
    assert codes.dtype == torch.int8 and codes.shape == (150, 10) and codes.is_contiguous()
    assert scale.dtype == torch.float32 and scale.shape == (10,)
    assert codes.abs().max() <= 127 and not saturates(codes)
    error = (restore(codes, scale) - weight).norm(dim=1) / weight.norm(dim=1)
    assert error.max() < 0.05


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 15, 64])
def test_no_pair_of_neighbours_saturates(channels: int, calibrated: bool) -> None:
    """Equal weights fill every pair to the brim, and rounding errors press the same way."""
    torch.manual_seed(6)
    weight = torch.cat([torch.ones(8, channels), torch.rand(8, channels) + 0.9]) * 3.7
    weight[::2] *= -1
    inputs = torch.randn(50, 1) + 0.1 * torch.randn(50, channels)
    codes, scale = quantize_weight(weight, input_hessian(inputs) if calibrated else None)
    assert not saturates(codes)
    assert torch.all((restore(codes, scale) - weight).abs() <= weight.abs() * 0.05)


def test_a_large_weight_beside_small_ones_uses_all_8_bits() -> None:
    weight = torch.tensor([[1.0, 0.0, 0.25, 0.25], [-1.0, 1.0, 0.25, -0.25]])
    codes, _ = quantize_weight(weight)
    assert codes.T.tolist() == [[127, 0, 32, 32], [-127, 127, 32, -32]]


def test_nearest_rounding_is_within_half_a_step() -> None:
    torch.manual_seed(1)
    weight = torch.randn(7, 33)
    codes, scale = quantize_weight(weight)
    assert torch.all((restore(codes, scale) - weight).abs() <= scale[:, None] * 0.5001)
    assert torch.all(scale < weight.abs().amax(dim=1) / 64)  # finer than 7 bits for every weight


def test_calibration_lowers_the_output_error_on_unseen_inputs() -> None:
    torch.manual_seed(2)
    weight = torch.randn(40, 200)
    inputs = correlated_inputs(1200, 200)
    seen, unseen = inputs[:800], inputs[800:]

    def error(hessian: torch.Tensor | None) -> float:
        restored = restore(*quantize_weight(weight, hessian))
        return (unseen @ (restored - weight).T).square().mean().item()

    assert error(input_hessian(seen)) < 0.6 * error(None)


def test_one_huge_token_does_not_spoil_the_others() -> None:
    torch.manual_seed(3)
    weight = torch.randn(40, 128)
    inputs = correlated_inputs(800, 128)
    sink = torch.zeros(1, 128)
    sink[0, 5] = 1e4
    clean = restore(*quantize_weight(weight, input_hessian(inputs)))
    mixed = restore(*quantize_weight(weight, input_hessian(torch.cat([sink, inputs]))))
    clean_error = (inputs @ (clean - weight).T).square().mean()
    mixed_error = (inputs @ (mixed - weight).T).square().mean()
    assert mixed_error < 1.2 * clean_error


def test_uncorrelated_inputs_mean_nearest_rounding() -> None:
    torch.manual_seed(4)
    weight = torch.randn(6, 70)
    nearest, _ = quantize_weight(weight)
    calibrated, _ = quantize_weight(weight, torch.diag(torch.rand(70) + 0.1))
    assert torch.equal(calibrated, nearest)


def test_dead_rows_channels_and_wide_layers() -> None:
    torch.manual_seed(5)
    weight = torch.randn(5000, 20)  # more outputs than are rounded together
    weight[3] = 0
    inputs = torch.randn(60, 20)
    inputs[:, 7] = 0
    codes, scale = quantize_weight(weight, input_hessian(inputs))
    assert torch.isfinite(scale).all() and torch.all(codes[:, 3] == 0)
    assert (restore(codes, scale) - weight).abs().max() < 0.2
    silent, _ = quantize_weight(weight, torch.zeros(20, 20))
    assert torch.equal(silent, quantize_weight(weight)[0])
