import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anymla.runtime.page_pool import NULL_PAGE, PagePool


class PoolMachine(RuleBasedStateMachine):
    """Requests reserve, take and return in any order; each holds what it took."""

    @initialize(pages=st.integers(1, 12))
    def create(self, pages):
        self.pool = PagePool("window", pages + 1)
        self.promised: list[int] = []
        self.taken: list[list[int]] = []

    @rule(pages=st.integers(0, 6))
    def admit(self, pages):
        fits = sum(self.promised) + pages <= self.pool.capacity
        assert self.pool.can_reserve(pages) == fits
        if fits:
            self.pool.reserve(pages)
            self.promised.append(pages)
            self.taken.append([])

    def _with_room(self):
        return [i for i, pages in enumerate(self.taken) if len(pages) < self.promised[i]]

    @precondition(lambda self: self._with_room())
    @rule(data=st.data())
    def take(self, data):
        who = data.draw(st.sampled_from(self._with_room()))
        self.taken[who].append(self.pool.take())

    @precondition(lambda self: any(self.taken))
    @rule(data=st.data())
    def put_back(self, data):
        who = data.draw(st.sampled_from([i for i, pages in enumerate(self.taken) if pages]))
        place = data.draw(st.integers(0, len(self.taken[who]) - 1))
        self.pool.put_back(self.taken[who].pop(place))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def leave(self, data):
        who = data.draw(st.integers(0, len(self.taken) - 1))
        for page in self.taken.pop(who):
            self.pool.put_back(page)
        self.pool.cancel(self.promised.pop(who))

    @invariant()
    def no_page_twice(self):
        out = [page for pages in self.taken for page in pages]
        assert len(set(out)) == len(out) == self.pool.held
        assert all(NULL_PAGE < page < self.pool.num_pages for page in out)
        assert self.pool.reserved == sum(self.promised)

    def teardown(self):
        while self.taken:
            for page in self.taken.pop():
                self.pool.put_back(page)
            self.pool.cancel(self.promised.pop())
        assert (self.pool.held, self.pool.reserved) == (0, 0)
        self.pool.reserve(self.pool.capacity)
        again = {self.pool.take() for _ in range(self.pool.capacity)}
        assert again == set(range(1, self.pool.num_pages))


TestPool = PoolMachine.TestCase


def test_needs_a_null_page():
    with pytest.raises(ValueError, match="page pool 'c4': needs at least the null page, got 0"):
        PagePool("c4", 0)


def test_misuse_is_caught():
    pool = PagePool("c4", 3)
    with pytest.raises(AssertionError, match="beyond reservations"):
        pool.take()
    pool.reserve(1)
    page = pool.take()
    pool.put_back(page)
    with pytest.raises(AssertionError, match="is not out"):
        pool.put_back(page)
    with pytest.raises(AssertionError, match="is not out"):
        pool.put_back(NULL_PAGE)
