"""Hypothesis on N ranks: rank 0 draws and broadcasts, all ranks run, and the verdict is agreed before shrinking."""

import functools
import traceback

from hypothesis import given, settings


def given_on_ranks(strategy, max_examples: int = 25):
    """Run a test `body(world, example)` on all ranks for examples that rank 0 draws from `strategy`.

    Where any rank fails, rank 0 fails the example, so that all ranks see the same ones while it shrinks. On more than
    four ranks there are half as many examples: they take turns on few cores.
    """

    def decorate(body):
        @functools.wraps(body)
        def test(world):
            def run(example):
                world.broadcast_object(("run", example))
                _agree(world, _attempt(body, world, example))

            if world.rank == 0:
                examples = max_examples if world.size <= 4 else max_examples // 2
                try:
                    settings(max_examples=examples, deadline=None, database=None)(given(strategy)(run))()
                finally:
                    world.broadcast_object(("stop", None))
                return
            failure = None
            while (message := world.broadcast_object(None))[0] == "run":
                failure = _attempt(body, world, message[1])
                try:
                    _agree(world, failure)
                except AssertionError as agreed:
                    failure = agreed
                else:
                    failure = None
            if failure:
                raise failure

        test.__wrapped__ = None  # pytest reads the signature of what is wrapped
        del test.__wrapped__
        return test

    return decorate


def _attempt(body, world, example) -> Exception | None:
    try:
        body(world, example)
    except Exception as error:
        traceback.print_exc()  # at once: the other ranks may wait for this one, and then nothing else is printed
        return error
    return None


def _agree(world, failure: Exception | None) -> None:
    texts = world.gather_objects(failure and f"rank {world.rank}: {type(failure).__name__}: {failure}")
    summary = world.broadcast_object("\n".join(filter(None, texts)) if world.rank == 0 else None)
    if summary:
        raise AssertionError(summary)
