"""The composition root: the public classes, built of options, a transport and the parts that they name.

An option is defined once, in its model in `options/` (those of publishing: in `HubProducer`). What is repeated here for
editors and checkers follows from it: the names and types of the typed dictionaries are compared with the models by a
test, and their docstrings and the options in the classes' docstrings are written by `python docs/options.py`.
"""
