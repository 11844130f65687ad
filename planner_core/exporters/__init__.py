"""Write a plan in the form of another program.

`planning.methods.tools` has one entry for each form: its name, its writer, its limits. `export_text` writes the plan, or raises an
error that says why the form cannot hold it; with `nearest` it writes the best plan that the form can hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner_core import lazy_exports
from planner_core.exporters.remarks import Remark, RemarkKind, name_file

if TYPE_CHECKING:
    from planner_core.exporters.api import check_file_name, export, export_text, write_export

__getattr__, __dir__ = lazy_exports(__name__)  # these modules import torch
