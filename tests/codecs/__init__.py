import pytest

pytest.register_assert_rewrite("tests.codecs.contract", "tests.codecs.shuttle")
