# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""The compiled core: what is done once per event. Each part does what Python code of the same name does.

That code is the reference. What is unusual is left to it: then a function here takes no more, or a class calls a method
that its Python subclass has. `tests/unit/test_core.py` compares the two on damaged bytes.

Every size and index that comes from bytes is compared with what is there before anything is read. Integers of a size on
the wire have 32 bits and are kept in 64, so that no sum of them overflows.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t
from libc.string cimport memcmp

cdef extern from *:
    """
    #ifndef EVENTPUMP_SOURCE
    #define EVENTPUMP_SOURCE 0U
    #endif
    """
    const uint32_t EVENTPUMP_SOURCE

SOURCE = EVENTPUMP_SOURCE
"""The CRC-32 of the source that this was built from."""


cdef inline Py_ssize_t size_at(const unsigned char *at) noexcept nogil:
    """Read four bytes as a number, the first being the highest."""
    return (<Py_ssize_t>at[0] << 24) | (<Py_ssize_t>at[1] << 16) | (<Py_ssize_t>at[2] << 8) | <Py_ssize_t>at[3]


# ------------------------------------------------------------------------- amqp/receiver.py: transfers of one form


def take_run(form not None, bytes data not None, Py_ssize_t pos, Py_ssize_t largest, Py_ssize_t room, list inbox not None):
    """See `eventpump.amqp.receiver.take_run`."""
    cdef bytes prefix, tag_mark, rest
    cdef Py_ssize_t id_at, tag_at, rest_at, payload_at
    prefix, id_at, tag_mark, tag_at, rest, rest_at, payload_at, _, _ = form
    cdef Py_ssize_t prefix_size = len(prefix), tag_size = len(tag_mark), rest_size = len(rest)
    if (
        prefix is None or tag_mark is None or rest is None or pos < 0
        or not 4 + prefix_size == id_at <= tag_at <= tag_at + tag_size <= rest_at
        or rest_at + rest_size != payload_at
        or payload_at < 8
    ):
        raise ValueError("this is no form of a transfer")
    cdef const unsigned char *start = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef const unsigned char *frame
    cdef const char *prefix_bytes = PyBytes_AS_STRING(prefix)
    cdef const char *tag_bytes = PyBytes_AS_STRING(tag_mark)
    cdef const char *rest_bytes = PyBytes_AS_STRING(rest)
    cdef Py_ssize_t end = PyBytes_GET_SIZE(data), size
    while room > 0 and end - pos >= payload_at:
        frame = start + pos
        size = size_at(frame)
        if size < payload_at or size > largest or size > end - pos:
            break
        if (
            memcmp(frame + 4, prefix_bytes, prefix_size)
            or memcmp(frame + rest_at, rest_bytes, rest_size)
            or memcmp(frame + tag_at, tag_bytes, tag_size)
        ):
            break
        inbox.append(PyBytes_FromStringAndSize(<const char *>frame + payload_at, size - payload_at))
        pos += size
        room -= 1
    return pos
