"""Pages that are opened here take their plans from where those of tests/pages do."""

from tests.pages.conftest import _nothing_behind_the_answer as _nothing_behind_the_answer
from tests.pages.conftest import _plans_once as _plans_once
