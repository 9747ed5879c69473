"""A device whose streams are as late as they may be, which shows where code leaves their order to chance."""

from collections import deque


class MainMark:
    """Passed once it has been waited for, or a later one."""

    def __init__(self, streams, number):
        self._streams = streams
        self._number = number

    @property
    def is_passed(self):
        return self._streams.last_passed >= self._number

    def wait(self):
        self._streams.last_passed = max(self._streams.last_passed, self._number)

    def ms_since(self, earlier):
        assert self.is_passed
        assert earlier.is_passed
        return 1.0


class SideMark:
    """Passed once the work before it is done."""

    def __init__(self, streams):
        self._streams = streams
        self.is_passed = False

    def wait(self):
        self._streams.catch_up(self)

    def ms_since(self, earlier):
        assert self.is_passed
        assert earlier.is_passed
        return 1.0


class LateStreams:
    """The main stream works at once, but reports it late; the other one works only when it is waited for.

    Attributes:
        last_passed: number of the last mark of the main stream that it reports as passed.
        num_waits: how often the main stream has waited for the other.
    """

    def __init__(self):
        self.last_passed = 0
        self.num_waits = 0
        self._num_marks = 0
        self._postponed = deque()

    def mark(self):
        self._num_marks += 1
        return MainMark(self, self._num_marks)

    def beside(self, work):
        begun, ended = SideMark(self), SideMark(self)
        self._postponed.append((work, begun, ended))
        return begun, ended

    def wait_for(self, mark):
        self.num_waits += 1
        self.catch_up(mark)

    def catch_up(self, mark):
        while any(mark is ended for _, _, ended in self._postponed):
            work, begun, ended = self._postponed.popleft()
            work()
            begun.is_passed = ended.is_passed = True
