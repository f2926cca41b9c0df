"""Decisions about the averages of a pass: who begins them, and how often."""

from hf_axonn.engine.averaging import GradientAveraging


def test_a_backward_pass_of_a_plain_loop_leaves_gradients_to_the_loop():
    averaging = GradientAveraging()
    averaging.begin_pass()
    assert averaging.averages and not averaging.backward_begins()


def test_a_prepared_model_averages_once_a_backward_pass():
    averaging = GradientAveraging()
    averaging.average_by_itself()
    averaging.begin_pass()
    assert [averaging.backward_begins() for _ in range(3)] == [True, False, False]
    averaging.finish()
    assert averaging.backward_begins()  # a second backward pass through the same forward pass


def test_a_failed_backward_pass_is_forgotten():
    averaging = GradientAveraging()
    averaging.average_by_itself()
    averaging.begin_pass()
    assert averaging.backward_begins()
    averaging.begin_pass()
    assert averaging.backward_begins()


def test_the_pass_decides_where_it_begins():
    averaging = GradientAveraging()
    averaging.average_by_itself()
    with averaging.no_sync(), averaging.no_sync():
        averaging.begin_pass()
    assert not averaging.averages and not averaging.backward_begins()
    with averaging.force_sync():
        assert averaging.averages and averaging.backward_begins()
        averaging.finish()
    assert not averaging.averages
    averaging.begin_pass()
    with averaging.no_sync():
        assert averaging.backward_begins()  # the pass began outside


def test_a_caller_that_averages_is_not_done_twice():
    averaging = GradientAveraging()
    averaging.average_by_itself()
    averaging.begin_pass()
    with averaging.by_caller():
        assert averaging.averages and not averaging.backward_begins()
    assert averaging.backward_begins()
