"""What jobs of tests import, for the server from which ranks are forked: a rank that imports it by itself takes as long as its job."""

import gc

import hypothesis  # noqa: F401
import jsonschema  # noqa: F401
import pytest  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import planner_core.planning
import planner_core.verification  # noqa: F401
from tests.support import own_model  # noqa: F401

# A rank that collects garbage would write into every page that it shares with the server, and so copy it.
gc.collect()
gc.freeze()
