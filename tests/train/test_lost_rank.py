"""Which errors mean that another rank is gone, and what a rank then says."""

from __future__ import annotations

import pytest

from megaparcae.train.lost_rank import LostRankError, is_lost_rank

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "


@pytest.mark.parametrize(
    "said",
    [
        PAIR + "Connection closed by peer [10.0.0.1]:36064. This is typically caused by ...",
        PAIR + "Read error [10.0.0.1]:51901: Connection reset by peer.",
        PAIR + "writev [10.0.0.1]:51901: Broken pipe",
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv",
        NCCL + "remote process exited or there was a network error, NCCL version 2.27.5\n"
        "ncclRemoteError: A call failed possibly due to a network error",
        "NCCL communicator was aborted on rank 0.",
    ],
)
def test_a_transport_that_lost_its_peer_is_recognised_below_other_errors(said):
    assert is_lost_rank(RuntimeError(said))
    outer = ValueError("the step failed")
    outer.__cause__ = RuntimeError(said)
    assert is_lost_rank(outer)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(PAIR + "op.preamble.length <= op.nbytes. 8192 vs 4096"),
        RuntimeError(NCCL + "invalid usage (run with NCCL_DEBUG=WARN for details)"),
        RuntimeError("CUDA out of memory"),
        ConnectionResetError("Connection reset by peer"),
    ],
)
def test_our_own_mistakes_and_other_connections_are_not_a_lost_rank(error):
    assert not is_lost_rank(error)


def test_the_sentence_names_the_host_the_last_step_and_the_remedy(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "worker-7")
    assert str(LostRankError(40)) == (
        "worker-7: another rank was lost after step 40 (its machine's messages may say why); "
        "start the same command again to resume"
    )
    assert "before the first step" in str(LostRankError(None))
    gone = RuntimeError("the step failed")
    gone.__cause__ = RuntimeError(PAIR + "Connection closed by peer [10.0.0.3]:36064. This is")
    assert "(the messages of 10.0.0.3 may say why)" in str(LostRankError(3, gone))
