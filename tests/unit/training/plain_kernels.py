"""What the variable-length kernels of a GPU compute, written out for any dtype and device."""

from __future__ import annotations

import torch

from headrace.training.attention import Kernels


class PlainKernels(Kernels):
    """The gradient follows from the output and the log-sum-exp alone, as in the kernels: both may be those of more."""

    def take(self, query, value):
        return True

    def forward(self, q, k, v, ranges, scale, window):
        output, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
        for qs, ks in stretches(ranges):
            scores = self._scores(q[qs], k[ks], ranges.causal, scale, window)
            lse[:, qs] = scores.logsumexp(-1)
            output[qs] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), repeated(v[ks], q))
        return output, lse

    def backward(self, gradient, q, k, v, output, lse, ranges, scale, window):
        found = [torch.zeros_like(x) for x in (q, k, v)]
        for qs, ks in stretches(ranges):
            p = (self._scores(q[qs], k[ks], ranges.causal, scale, window) - lse[:, qs, None]).exp()
            common = (gradient[qs] * output[qs]).sum(-1).t()[..., None]
            of_p = torch.einsum("nhd,mhd->hnm", gradient[qs], repeated(v[ks], q))
            of_s = p * (of_p - common) * scale
            found[0][qs] += torch.einsum("hnm,mhd->nhd", of_s, repeated(k[ks], q))
            groups = k.shape[1], -1
            found[1][ks] += torch.einsum("hnm,nhd->mhd", of_s, q[qs]).unflatten(1, groups).sum(2)
            found[2][ks] += torch.einsum("hnm,nhd->mhd", p, gradient[qs]).unflatten(1, groups).sum(2)
        return tuple(found)

    @staticmethod
    def _scores(q, k, causal, scale, window):
        scores = torch.einsum("nhd,mhd->hnm", q, repeated(k, q)) * scale
        if causal:
            n = len(q)
            seen = torch.ones(n, n, dtype=torch.bool).tril()
            if window is not None:
                seen &= ~torch.ones(n, n, dtype=torch.bool).tril(-window)
            scores = scores.masked_fill(~seen, float("-inf"))
        return scores


def stretches(ranges):
    q, k = ranges.queries.tolist(), ranges.keys.tolist()
    return [(slice(q[i], q[i + 1]), slice(k[i], k[i + 1])) for i in range(len(q) - 1)]


def repeated(x, q):
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
