"""Runs the user's code for the events of a keyed queue: several calls at a time, one per key."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import partial
from typing import Any

from eventpump.aio.tasks import TaskSet
from eventpump.aio.watch import ESCAPED, Watched
from eventpump.consumer.calls.handler import IN_HAND, Call, HandlerRunner, InHand, PumpEndedError, as_exception
from eventpump.consumer.keyed import Handler, KeyedProcessor
from eventpump.consumer.processor import PartitionContext
from eventpump.core.keyed import KeyedEntry, KeyedQueue
from eventpump.core.loop_load import NOTED_STEP
from eventpump.eventhubs.events import ReceivedEvent

CALLS_PER_STEP = 100
"""Calls that a worker makes without a wait before other tasks have a turn."""

CLEAR_FOR = 0.001
"""Seconds for which it need not be asked again whether a call may begin."""

Entry = KeyedEntry[ReceivedEvent]


class KeyedWorkers:
    """Tasks that call a handler for the events that a queue has ready. They exist only while there are any.

    A handler that does not wait is called by one worker for event after event, and these are not sorted by their keys.
    When it waits, further workers are started, as many as keys are ready and `concurrency` allows.

    Args:
        call: What is called with the events of one key, in order.
        runner: Measures the calls, and cancels them at their deadlines.
        may_start: Returns whether a call may begin now. Called before a call, unless it was within `CLEAR_FOR` before.
        recover: Called with the entries of a call that raised, and its error; and with one of the queue's `unready`,
            and None. Finishes them, or finds the key of `unkeyed` (`key_again`); or returns False: then they are not
            finished, and their key has no further turn.
        waits: Called soon after a worker has begun to wait.
        ended: Called when a worker has ended.
        failed: Called with an error that ends a worker and that is not the handler's.
    """

    def __init__(
        self,
        processor: KeyedProcessor,
        call: Handler,
        context: PartitionContext,
        runner: HandlerRunner,
        tasks: TaskSet,
        *,
        may_start: Callable[[], bool],
        recover: Callable[[list[Entry], Exception | None], Awaitable[bool]],
        waits: Callable[[], None],
        ended: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._concurrency = processor.settings.concurrency
        self._key_of = processor.key
        self._runner = runner
        self._tasks = tasks
        self._handle = partial(call, context)
        self._may_start = may_start
        self._recover = recover
        self._on_wait = waits
        self._on_end = ended
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        # Not that of a handler, in which a worker may be started: what it has set is not for the calls of others.
        self._context = copy_context()
        self._about_to_take = 0
        self._clear_until = -math.inf
        self._is_turning = False
        self._is_waiting = False
        self._resting = 0
        self._claims: deque[asyncio.Future[None]] = deque()
        self.active = 0
        """How many workers there are."""

    def look(self, queue: KeyedQueue[ReceivedEvent]) -> None:
        """Start a worker if the queue has something to be taken and no worker is about to take it."""
        if not queue.ready and queue.can_sort and not queue.is_in_order:
            self._sort(queue)
        has_next = queue.ready or queue.is_in_order
        if has_next and not self._about_to_take and self._free > 0 and self._may_start():
            self._start(queue)

    def key_again(self, queue: KeyedQueue[ReceivedEvent], event: ReceivedEvent) -> Exception | None:
        """Find the key of the event that is `unkeyed`, and its place in line. Return what the key raised; None if it is
        known."""
        error, queue.key_error = queue.key_error, None
        if error is not None:
            return as_exception("key", error)
        try:
            queue.resolve(self._key_of(event))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:
            return as_exception("key", raised)
        return None

    def _sort(self, queue: KeyedQueue[ReceivedEvent]) -> None:
        began = self._loop.time()
        queue.sort(self._key_of)
        took = self._loop.time() - began
        if took > NOTED_STEP:
            self._runner.stepped(took)

    @property
    def _free(self) -> int:
        """How many workers may be started, beside those that have rested and wait to go on."""
        return self._concurrency - self.active + self._resting - len(self._claims)

    async def rest(self, queue: KeyedQueue[ReceivedEvent], waited: Awaitable[object]) -> None:
        """Wait, in a worker, while other keys have its place; and then until there is a place again."""
        self._resting += 1
        try:
            self._give_place()
            self.look(queue)
            await waited
            if self.active - self._resting >= self._concurrency:
                claim: asyncio.Future[None] = self._loop.create_future()
                self._claims.append(claim)
                try:
                    await claim
                finally:
                    self._claims.remove(claim)
        finally:
            self._resting -= 1

    def _give_place(self) -> None:
        """Let one that has rested go on: a place is free."""
        for claim in self._claims:
            if not claim.done():
                claim.set_result(None)
                return

    def check_again(self) -> None:
        """Ask `may_start` before the next call, also within the running step."""
        self._clear_until = -math.inf

    def _start(self, queue: KeyedQueue[ReceivedEvent]) -> None:
        self.active += 1
        self._about_to_take += 1
        worker = _Worker()
        task = self._context.run(self._tasks.spawn, self._run(queue, worker), "eventpump worker")
        task.add_done_callback(lambda _: self._ended(queue, worker))

    def _ended(self, queue: KeyedQueue[ReceivedEvent], worker: _Worker) -> None:
        # Not in a `finally` of the task: one that is cancelled before its first step does not run it.
        self.active -= 1
        if not worker.has_begun:
            self._about_to_take -= 1
        self._clear_until = -math.inf
        self._give_place()
        self._on_end()
        self.look(queue)

    async def _run(self, queue: KeyedQueue[ReceivedEvent], worker: _Worker) -> None:
        worker.has_begun = True
        self._about_to_take -= 1
        self._clear_until = -math.inf
        try:
            worker.steps = self._runner.watched(self._work(queue, worker), lambda: self._waits(queue, worker))
            await worker.steps
        except PumpEndedError:
            pass
        except asyncio.CancelledError as error:
            # Not in the user's code, whose errors are handled.
            await self._runner.take_cancellation_back()
            failure = RuntimeError("a task of the pump was cancelled, and not by eventpump")
            failure.__cause__ = error
            self._failed(failure)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            self._failed(as_exception("a worker", error))

    def _waits(self, queue: KeyedQueue[ReceivedEvent], worker: _Worker) -> None:
        if not worker.is_yielding:
            self._is_waiting = True
        if worker.call is not None:
            # From now on others look at what is in hand.
            worker.call.slow_at = worker.call.began + self._runner.timeout
            worker.call = None
            worker.entry = queue.enter(worker.key)
        if not self._is_turning:
            # Once per turn of the loop, for all workers that begin to wait in it.
            self._is_turning = True
            self._loop.call_soon(self._turned, queue)

    def _turned(self, queue: KeyedQueue[ReceivedEvent]) -> None:
        """Let others take what is ready: workers have begun to wait."""
        is_waiting, self._is_waiting = self._is_waiting, False
        self._is_turning = False
        self._clear_until = -math.inf
        self._on_wait()
        if not is_waiting:
            return  # those that only let others have a turn go on
        self._sort(queue)
        more = min(len(queue.ready), self._free) - self._about_to_take
        if more > 0 and self._may_start():
            for _ in range(more):
                self._start(queue)

    async def _work(self, queue: KeyedQueue[ReceivedEvent], worker: _Worker) -> None:
        # Long on purpose, as no other function is: in functions of their own, its steps take 3 µs more per event.
        runner, handle, now, unready = self._runner, self._handle, self._loop.time, queue.unready
        call = runner.call("process_events")
        ready, claims, takes_one = queue.ready, self._claims, queue.takes_one
        task, timeout, begin = call.task, runner.timeout, IN_HAND.set
        runner.began(call)
        try:
            while not claims:
                if not ready:
                    if queue.can_sort and not queue.is_in_order:
                        self._sort(queue)
                    if not ready and not queue.is_in_order:
                        return
                began = now()
                if began >= self._clear_until:
                    if not self._may_start():
                        return
                    self._clear_until = began + CLEAR_FOR
                if worker.calls >= CALLS_PER_STEP:
                    # A handler that never waits must not block the event loop.
                    worker.calls = 0
                    runner.ended(call)
                    worker.is_yielding, self._about_to_take = True, self._about_to_take + 1
                    try:
                        await asyncio.sleep(0)
                    finally:
                        worker.is_yielding, self._about_to_take = False, self._about_to_take - 1
                    runner.began(call)
                    continue
                raised: BaseException | None = None
                if not ready:
                    raised = await self._in_order(queue, worker, call)
                    if worker.entry is None:
                        continue
                    batch = [worker.entry]
                    worker.entry = None
                else:
                    worker.calls += 1
                    batch = [ready.popleft()] if takes_one else queue.take()
                    if unready and batch[0] in unready:
                        runner.ended(call)
                        if not await self._recover(batch, None):
                            return
                        if batch[0].is_finished:  # else it waits in the line of its key, which is known now
                            queue.release(batch[0])
                        runner.began(call)
                        continue
                    # One watched call whose timer restarts: `began` and `ended` would cost more than a short handler.
                    call.began = began
                    call.slow_at = began + timeout
                    hand = InHand()
                    hand.runner, hand.call = runner, None
                    begin(hand)
                    try:
                        events: Any = (batch[0].position,) if len(batch) == 1 else tuple([each.event for each in batch])
                        call.events = events
                        work = call.work = handle(events)
                        await work
                    except GeneratorExit as error:
                        if worker.steps is None or worker.steps.is_closing:
                            raise
                        raised = RuntimeError(ESCAPED)
                        raised.__cause__ = error
                    except BaseException as error:
                        raised = error
                    finally:
                        hand.runner = None
                if raised is None and not call.is_timed_out and not task.cancelling():
                    if len(batch) == 1:
                        queue.finish_alone(batch[0])
                        continue
                    for entry in batch:
                        queue.finish(entry)
                    queue.release(batch[-1])
                    continue
                runner.ended(call)
                failure, raised = raised, None  # the traceback refers to this frame
                if task.cancelling():
                    await runner.take_cancellation_back()
                if failure is None:
                    for entry in batch:
                        queue.finish(entry)
                elif not await self._failed_call(batch, runner.error_of(call, failure)):
                    failure = None
                    return
                failure = None
                queue.release(batch[-1])
                runner.began(call)
        finally:
            runner.ended(call)

    async def _in_order(self, queue: KeyedQueue[ReceivedEvent], worker: _Worker, call: Call) -> BaseException | None:
        """Call the handler with one fresh event after the other, until it waits, or something else is to be done.

        Nothing is kept of an event for which the handler neither waits nor raises.
        """
        handle, key_of, now, claims, fresh = self._handle, self._key_of, self._loop.time, self._claims, queue.fresh
        runner, begin = self._runner, IN_HAND.set
        is_cancelled = call.task.cancelling
        raised: BaseException | None = None
        calls = worker.calls
        worker.call = call
        while calls < CALLS_PER_STEP and queue.done < len(fresh) and not claims:
            # The number of the event may change meanwhile, not its place: it is the first that is not finished.
            event = fresh[queue.done]
            began = now()
            if began >= self._clear_until and calls > worker.calls:
                break  # before the first call that was asked just now
            try:
                key = worker.key = key_of(event)
                hash(key)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                queue.enter_unkeyed(error)
                break
            calls += 1
            call.began = began
            hand = InHand()
            hand.runner, hand.call = runner, None
            begin(hand)
            try:
                events = call.events = (event,)
                work = call.work = handle(events)
                await work
            except GeneratorExit as error:
                if worker.steps is None or worker.steps.is_closing:
                    raise
                raised = RuntimeError(ESCAPED)
                raised.__cause__ = error
            except BaseException as error:
                raised = error
            finally:
                hand.runner = None
            if raised is None and worker.entry is None and not is_cancelled():
                queue.done += 1
                continue
            if worker.entry is None:
                worker.entry = queue.enter(key)
            break
        worker.call = None
        worker.calls = calls
        return raised

    async def _failed_call(self, batch: list[Entry], error: BaseException) -> bool:
        if not isinstance(error, Exception):
            raise error
        return await self._recover(batch, error)


class _Worker:
    """One worker.

    Attributes:
        calls: How many calls it has made since it last waited for others to have a turn.
        call: What it calls with a fresh event, of which nothing is kept so far.
    """

    __slots__ = ("call", "calls", "entry", "has_begun", "is_yielding", "key", "steps")

    def __init__(self) -> None:
        self.calls = 0
        self.call: Call | None = None
        self.key: object = None
        self.entry: Entry | None = None
        self.is_yielding = False
        self.has_begun = False
        self.steps: Watched[None] | None = None
