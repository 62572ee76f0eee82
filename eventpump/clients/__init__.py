"""The composition root: the public classes, built of options, a transport and the parts that they name.

Their options are defined in `options/`: type and meaning in a typed dictionary, default and bounds in the model beside
it. `takes_options` composes the signatures and docstrings of the classes from both.
"""
