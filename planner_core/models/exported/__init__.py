"""Read files of torch.export (.pt2) as data: `archive` reads the file, `program` turns it into a module that capture can run.

torch's own loader is not used: it unpickles parts of a file, reads every weight, and needs the code of custom operators. docs/DESIGN.md
weighs the two.
"""
