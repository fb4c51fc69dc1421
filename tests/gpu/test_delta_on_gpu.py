"""Deltas of snapshots on a device: they are made on the host and applied where the snapshot is."""

import pytest
import torch

from headrace.delivery import delta

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.03, 0.5])
def test_a_device_takes_the_host_s_deltas(word_bytes: int, share: float):
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(0, 256, (word_bytes * 2_500_001 + word_bytes - 1,), generator=generator, dtype=torch.uint8)
    new = base.clone()
    chosen = torch.rand(len(base), generator=generator) < share
    new[chosen] += 1
    payload = delta.encode(base, new, word_bytes, limit=1 << 40)
    assert payload is not None
    target = base.cuda()
    delta.apply(payload, target)
    assert torch.equal(target.cpu(), new)
