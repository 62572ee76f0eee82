"""The composition root: the public classes, built of options, a transport and the parts that they name."""
