# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The compiled core: what is done once per event. Each part does what Python code of the same name does.

That code is the reference. What is unusual is left to it: then a function here takes no more, or a class calls a method
that its Python subclass has. `tests/unit/test_core.py` compares the two on damaged bytes.

Every size and index that comes from bytes is compared with what is there before anything is read. Integers of a size on
the wire have 32 bits and are kept in 64, so that no sum of them overflows.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.datetime cimport (
    datetime_day, datetime_hour, datetime_microsecond, datetime_minute, datetime_month, datetime_new, datetime_second,
    datetime_tzinfo, datetime_year, get_utc, import_datetime,
)
from cpython.contextvars cimport PyContext_CopyCurrent, PyContext_Enter, PyContext_Exit
from cpython.dict cimport PyDict_CheckExact, PyDict_Copy
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.list cimport PyList_CheckExact
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_AsUnsignedLongLong, PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.unicode cimport PyUnicode_AsUTF8String, PyUnicode_Check, PyUnicode_CheckExact, PyUnicode_DecodeUTF8
from libc.math cimport INFINITY
from libc.stdint cimport INT32_MAX, INT64_MAX, UINT32_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memmove

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident()
    const Py_ssize_t PY_SSIZE_T_MAX
    bint PyUnicode_IS_COMPACT_ASCII(object)
    Py_ssize_t PyUnicode_GET_LENGTH(object)
    bint PyUnicode_IS_ASCII(object)
    uint32_t PyUnicode_READ_CHAR(object, Py_ssize_t)
    void *PyUnicode_DATA(object)
    int PyObject_GenericSetAttr(object, object, object) except -1

cdef extern from *:
    """
    static PyObject *eventpump_new(PyTypeObject *base, PyObject *kind, PyObject *value) {
        PyObject *made, *arguments = PyTuple_Pack(1, value);
        if (arguments == NULL) return NULL;
        made = base->tp_new((PyTypeObject *)kind, arguments, NULL);
        Py_DECREF(arguments);
        return made;
    }
    #define new_int(kind, value) eventpump_new(&PyLong_Type, kind, value)
    #define new_float(kind, value) eventpump_new(&PyFloat_Type, kind, value)
    #define new_text(kind, value) eventpump_new(&PyUnicode_Type, kind, value)
    #define new_bytes(kind, value) eventpump_new(&PyBytes_Type, kind, value)
    """
    # Instances of subclasses, made without calling those: the value is in the range of the class.
    object new_int(type kind, object value)
    object new_float(type kind, object value)
    object new_text(type kind, object value)
    object new_bytes(type kind, object value)

import_datetime()

cdef extern from *:
    """
    #ifndef EVENTPUMP_SOURCE
    #define EVENTPUMP_SOURCE 0U
    #endif
    """
    const uint32_t EVENTPUMP_SOURCE

SOURCE = EVENTPUMP_SOURCE
"""The CRC-32 of the source that this was built from."""


references = {}
"""The Python classes that those below are a part of, by the name of that part (`eventpump.compiled.based_on_core`)."""

cdef object whole_event = None
cdef type event_data = None


def complete(str name not None, reference not None, whole not None):
    """Set what belongs to a class of this module.

    Args:
        name: The class.
        reference: The whole class in Python.
        whole: What is made of both.
    """
    global whole_event, event_data, whole_messages
    references[name] = reference
    if name == "EncodedEvent":
        whole_event = whole
    elif name == "PlainEventData":
        if not isinstance(whole, type) or not issubclass(whole, PlainEventData):
            raise TypeError("the class of events must be based on that of the core")
        event_data = whole
    elif name == "PlainMessages":
        if not isinstance(whole, type) or not issubclass(whole, PlainMessages):
            raise TypeError("the class of messages must be based on that of the core")
        whole_messages = whole


cdef inline int64_t size_at(const unsigned char *at) noexcept nogil:
    """Read four bytes as a number, the first being the highest. It is not negative where a Py_ssize_t has 32 bits."""
    return (<int64_t>at[0] << 24) | (<int64_t>at[1] << 16) | (<int64_t>at[2] << 8) | <int64_t>at[3]


# ------------------------------------------------------------------------- amqp/forms.py: transfers of one form


def take_run(form not None, bytes data not None, Py_ssize_t pos, int64_t largest, Py_ssize_t room, list inbox not None):
    """See `eventpump.amqp.forms.take_run`."""
    cdef bytes prefix, tag_mark, rest
    cdef Py_ssize_t id_at, tag_at, rest_at, payload_at
    prefix, id_at, tag_mark, tag_at, rest, rest_at, payload_at, _ = form
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
    cdef Py_ssize_t end = PyBytes_GET_SIZE(data)
    cdef int64_t size
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
        inbox.append(PyBytes_FromStringAndSize(<const char *>frame + payload_at, <Py_ssize_t>size - payload_at))
        pos += <Py_ssize_t>size
        room -= 1
    return pos


# --------------------------------------------------------------- amqp/: links, sessions, and what a connection receives

cdef object opened = None, mapped = None, attached = None
cdef type whole_messages = None


def receive_transfers(connection_opened not None, session_mapped not None, link_attached not None):
    """Set the states in which transfers are received."""
    global opened, mapped, attached
    opened, mapped, attached = connection_opened, session_mapped, link_attached


@cython.auto_pickle(False)
cdef class PlainReassembly:
    """The base of `Reassembly` in the compiled build."""

    cdef public object buffer


@cython.auto_pickle(False)
cdef class PlainSession:
    """The base of `SessionFlow` in the compiled build."""

    cdef public object state
    cdef public int64_t incoming_window, next_incoming_id, reopens_at


@cython.auto_pickle(False)
cdef class PlainLink:
    """The base of `Link` in the compiled build."""

    cdef public object state, context, largest_message
    cdef public PlainSession session
    cdef public PlainReassembly incoming
    cdef public int64_t allowance, credit, delivery_count
    cdef public bint _enforces_credit


@cython.auto_pickle(False)
cdef class PlainMessages:
    """The base of `Messages` in the compiled build."""

    cdef public object link, payloads, delivery_ids, formats


@cython.auto_pickle(False)
cdef class PlainConnection:
    """The base of `Connection` in the compiled build."""

    cdef public object state, pending, _forms
    cdef public list _events
    cdef public dict _inboxes
    cdef public int64_t _max_frame_size, _turn
    cdef public bint _is_plain

    @cython.nonecheck(True)
    def receive(self, bytes data not None, int64_t turn=1 << 62):
        """Handle bytes from the peer: the run of plain transfers at their beginning here, the rest by the reference."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data), count, pos
        cdef int64_t largest
        cdef int overflow = 0
        if (
            self.state is not opened or not self._is_plain or size < 16 or self.pending
            or not PyDict_CheckExact(self._forms)
        ):
            return self._receive(data, turn)
        form = (<dict>self._forms).get(PyBytes_FromStringAndSize(PyBytes_AS_STRING(data) + 4, 12))
        if form is None:
            return self._receive(data, turn)
        cdef PlainLink link = form.link
        cdef PlainSession session = link.session
        if link.state is not attached or session.state is not mapped or link.incoming.buffer is not None:
            return self._receive(data, turn)
        largest = PyLong_AsLongLongAndOverflow(link.largest_message, &overflow)
        if overflow or largest > self._max_frame_size:
            largest = self._max_frame_size
        largest = min(largest + <int64_t>form.payload_at, self._max_frame_size)
        cdef list payloads = []
        pos = take_run(form, data, 0, largest, min(turn, link.allowance) if link._enforces_credit else turn, payloads)
        count = len(payloads)
        if not count:
            return self._receive(data, turn)
        cdef PlainMessages box = whole_messages.__new__(whole_messages)
        box.link, box.payloads, box.delivery_ids = link, payloads, []
        link.credit = link.credit - count if link.credit > count else 0
        link.allowance -= count
        link.delivery_count = (link.delivery_count + count) & UINT32_MAX
        session.next_incoming_id = (session.next_incoming_id + count) & UINT32_MAX
        session.incoming_window -= count
        if session.incoming_window <= session.reopens_at:
            session.send_flow()
        self._turn = turn - count
        if pos == size:
            return [box]
        self._events.append(box)
        self._inboxes[link] = box
        return self._receive_from(data, pos)


# ------------------------------------------------------------------------ eventhubs/events.py: what is read of events

cdef object python_moment = None, unread_key = None
cdef bytes sequence_name = b"", offset_name = b"", time_name = b"", key_name = b""


def read_events(
    to_moment, bytes sequence not None, bytes offset not None, bytes time not None, bytes key not None, unread=None
):
    """Set which annotations `EncodedEvent` reads.

    Args:
        to_moment: Makes a datetime of any number of milliseconds.
        sequence: The name of the annotation with the sequence number; likewise the others.
        unread: What the reference keeps as the key (`_key`) of an event whose key it has not read.
    """
    global unread_key
    unread_key = unread
    global python_moment, sequence_name, offset_name, time_name, key_name
    python_moment = to_moment
    sequence_name, offset_name, time_name, key_name = sequence, offset, time, key


cdef struct Found:
    # What a message has. Places are counted from its start.
    bint has_sequence
    bint has_time
    int64_t sequence
    int64_t time
    Py_ssize_t offset_at
    Py_ssize_t offset_size
    Py_ssize_t key_at  # or one of the two below
    Py_ssize_t key_size
    Py_ssize_t body_at  # -1 where it is not one data section
    Py_ssize_t body_size


cdef enum:
    NO_KEY = -1
    UNKNOWN_KEY = -2  # only the general decoder can read it


cdef inline int64_t long_at(const unsigned char *at) noexcept nogil:
    """Read eight bytes as a signed number."""
    return <int64_t>((<uint64_t>size_at(at) << 32) | <uint64_t>size_at(at + 4))


cdef inline bint is_named(const unsigned char *at, Py_ssize_t size, bytes name) noexcept:
    return size == PyBytes_GET_SIZE(name) and memcmp(at, PyBytes_AS_STRING(name), size) == 0


cdef Py_ssize_t after_value(const unsigned char *raw, Py_ssize_t pos, Py_ssize_t end) noexcept nogil:
    """Return the place after the value whose constructor is at `pos`, which is below `end`.

    -1 where it ends behind `end`, is described, or has no valid constructor.
    """
    cdef int kind = raw[pos] >> 4
    cdef int64_t size
    pos += 1
    if kind < 4:
        return -1
    if kind == 4:
        size = 0
    elif kind <= 9:
        size = 1 << (kind - 5)
    elif kind & 1 == 0:
        if end - pos < 1:
            return -1
        size = raw[pos]
        pos += 1
    else:
        if end - pos < 4:
            return -1
        size = size_at(raw + pos)
        pos += 4
    return pos + <Py_ssize_t>size if size <= end - pos else -1


cdef bint find_annotations(const unsigned char *raw, Py_ssize_t item, Py_ssize_t after, Found *found) noexcept:
    """Read the annotations whose items begin at `item`. False where the reference has to."""
    cdef Py_ssize_t value, following, size
    cdef const unsigned char *name
    cdef int kind
    while item < after:
        if raw[item] != 0xA3 or after - item < 2:
            return False
        name = raw + item + 2
        size = raw[item + 1]
        if size >= after - item - 2:
            return False
        value = item + 2 + size
        following = after_value(raw, value, after)
        if following < 0:
            return False
        kind = raw[value]
        if is_named(name, size, sequence_name) and kind in (0x81, 0x55):
            found.has_sequence = True
            found.sequence = long_at(raw + value + 1) if kind == 0x81 else <signed char>raw[value + 1]
        elif kind == 0xA1 and is_named(name, size, offset_name):
            if found.offset_at >= 0:
                return False  # written twice: both have to be UTF-8
            found.offset_at = value + 2
            found.offset_size = raw[value + 1]
        elif kind == 0x83 and is_named(name, size, time_name):
            found.has_time = True
            found.time = long_at(raw + value + 1)
        elif is_named(name, size, key_name):
            if kind == 0xA1 and found.key_at == NO_KEY:
                found.key_at = value + 2
                found.key_size = raw[value + 1]
            else:
                found.key_at = UNKNOWN_KEY
        item = following
    return item == after


cdef bint find(const unsigned char *raw, Py_ssize_t end, Found *found) noexcept:
    """Do what `amqp.sections._walk_event` does. False where the reference has to: the message may be unsound."""
    cdef Py_ssize_t pos = 0, start
    cdef int64_t size
    cdef int constructor, code, bodies = 0
    cdef bint has_annotations = False
    found.has_sequence = found.has_time = False
    found.offset_at = found.body_at = -1
    found.offset_size = found.body_size = found.key_size = 0
    found.key_at = NO_KEY
    while pos < end:
        if end - pos < 5 or raw[pos] != 0 or raw[pos + 1] != 0x53:
            return False
        code = raw[pos + 2]
        constructor = raw[pos + 3]
        if constructor == 0x45 and code == 0x73:
            pos += 4  # no properties, in the form of an empty list
            continue
        if constructor < 0xA0:
            return False
        if constructor & 0x10:
            if end - pos < 8:
                return False
            start = pos + 8
            size = size_at(raw + pos + 4)
        else:
            start = pos + 5
            size = raw[pos + 4]
        if size > end - start:
            return False
        if code == 0x75:
            if constructor & 0xEF != 0xA0:
                return False
            found.body_at = start
            found.body_size = <Py_ssize_t>size
            bodies += 1
        elif code == 0x72:
            if has_annotations or constructor & 0xEF != 0xC1:
                return False
            has_annotations = True
            if not find_annotations(raw, start + (4 if constructor & 0x10 else 1), start + <Py_ssize_t>size, found):
                return False
        elif code > 0x75:
            bodies += 2
        pos = start + <Py_ssize_t>size
    if bodies != 1:
        found.body_at = -1
    return found.has_sequence and found.has_time and found.offset_at >= 0


# -------------------------------------------- amqp/codec.py, amqp/sections.py: decoding a section, or one item of it

# A function here returns `not_read` where the reference has to decode: a value is damaged, or of an unusual type.

cdef enum:
    STANDARD = 13  # fields of the properties section
    MESSAGE_ID = 0
    CORRELATION_ID = 5
    CONTENT_TYPE = 6
    CONTENT_ENCODING = 7

cdef object not_read = object()
cdef type ubyte_class = int, ushort_class = int, uint_class = int, ulong_class = int
cdef type byte_class = int, short_class = int, int_class = int, timestamp_class = int
cdef type float_class = float, char_class = str, symbol_class = str
cdef type decimal32_class = bytes, decimal64_class = bytes, decimal128_class = bytes
cdef object described_class = None, zero_uint = None, zero_ulong = None, safe_unknown = None
cdef type uuid_class = None
cdef int section_depth = 0, weak_keys = 0
cdef Py_ssize_t never_counted = 0


def decode_values(
    tuple numbers not None, tuple texts not None, tuple decimals not None, type real not None, described not None,
    type uuids not None, int depth, int weak, Py_ssize_t uncounted,
):
    """Set what values are decoded with.

    Args:
        numbers: The classes of ubyte, ushort, uint, ulong, byte, short, int and timestamp.
        texts: Those of char and symbol.
        decimals: Those of decimal32, decimal64 and decimal128.
        real: That of float.
        described: That of described values.
        uuids: `uuid.UUID`.
        depth: How deeply values may nest in a section.
        weak: How many keys of a map may be UUIDs.
        uncounted: Bytes in which the number of values needs no check.
    """
    global ubyte_class, ushort_class, uint_class, ulong_class, byte_class, short_class, int_class, timestamp_class
    global float_class, char_class, symbol_class, decimal32_class, decimal64_class, decimal128_class
    global described_class, zero_uint, zero_ulong, safe_unknown, uuid_class, section_depth, weak_keys, never_counted
    for kinds, base in ((numbers, int), (texts, str), (decimals, bytes), ((real,), float)):
        if not all(isinstance(each, type) and issubclass(each, base) for each in kinds):
            raise TypeError("the classes of values must be subclasses of the values' types")
    (
        ubyte_class, ushort_class, uint_class, ulong_class, byte_class, short_class, int_class, timestamp_class
    ) = numbers
    char_class, symbol_class = texts
    decimal32_class, decimal64_class, decimal128_class = decimals
    float_class, described_class, uuid_class = real, described, uuids
    zero_uint, zero_ulong, safe_unknown = uint_class(0), ulong_class(0), uuids(int=0).is_safe
    section_depth, weak_keys, never_counted = depth, weak, uncounted


cdef inline bint is_ascii(const unsigned char *at, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t place
    for place in range(size):
        if at[place] & 0x80:
            return False
    return True


cdef object text_at(const unsigned char *at, Py_ssize_t size):
    """Decode text: `codec._text`."""
    try:
        return PyUnicode_DecodeUTF8(<const char *>at, size, NULL)
    except UnicodeDecodeError:
        return not_read


cdef object uuid_at(const unsigned char *at):
    """Do what `uuid.UUID(bytes=...)` does."""
    made = uuid_class.__new__(uuid_class)
    high, low = <uint64_t>long_at(at), <uint64_t>long_at(at + 8)
    PyObject_GenericSetAttr(made, "int", (high << 64) | low)
    PyObject_GenericSetAttr(made, "is_safe", safe_unknown)
    return made


cdef object fixed_at(int code, const unsigned char *at):
    """Decode a value whose bytes begin at `at`, all of which are there: those of constructors below 0xA0."""
    cdef uint32_t four
    cdef uint64_t eight
    cdef float single
    cdef double real
    if code == 0x81:
        return long_at(at)
    if code == 0x55:
        return <signed char>at[0]
    if code == 0x40:
        return None
    if code == 0x41:
        return True
    if code == 0x42:
        return False
    if code == 0x83:
        return new_int(timestamp_class, long_at(at))
    if code == 0x43:
        return zero_uint
    if code == 0x44:
        return zero_ulong
    if code == 0x45:
        return []
    if code == 0x50:
        return new_int(ubyte_class, at[0])
    if code == 0x51:
        return new_int(byte_class, <signed char>at[0])
    if code == 0x52:
        return new_int(uint_class, at[0])
    if code == 0x53:
        return new_int(ulong_class, at[0])
    if code == 0x54:
        return new_int(int_class, <signed char>at[0])
    if code == 0x56:
        return not_read if at[0] > 1 else at[0] == 1
    if code == 0x60:
        return new_int(ushort_class, (<int>at[0] << 8) | at[1])
    if code == 0x61:
        return new_int(short_class, (<int><signed char>at[0] * 256) + at[1])
    if code == 0x70:
        return new_int(uint_class, size_at(at))
    if code == 0x71:
        return new_int(int_class, <int32_t><uint32_t>size_at(at))
    if code == 0x72:
        four = <uint32_t>size_at(at)
        memcpy(&single, &four, 4)
        # How a signaling NaN is widened is the reference's matter.
        return new_float(float_class, <double>single) if single == single else not_read
    if code == 0x73:
        four = <uint32_t>size_at(at)
        if four > 0x10FFFF or 0xD800 <= four <= 0xDFFF:
            return not_read
        return new_text(char_class, chr(four))
    if code == 0x74:
        return new_bytes(decimal32_class, PyBytes_FromStringAndSize(<const char *>at, 4))
    if code == 0x80:
        return new_int(ulong_class, <uint64_t>long_at(at))
    if code == 0x82:
        eight = <uint64_t>long_at(at)
        memcpy(&real, &eight, 8)
        return real
    if code == 0x84:
        return new_bytes(decimal64_class, PyBytes_FromStringAndSize(<const char *>at, 8))
    if code == 0x94:
        return new_bytes(decimal128_class, PyBytes_FromStringAndSize(<const char *>at, 16))
    if code == 0x98:
        return uuid_at(at)
    return not_read


cdef object decoded(const unsigned char *raw, Py_ssize_t *place, Py_ssize_t end, int depth):
    """Decode the value at `place`, which is moved behind it: `codec._decode`."""
    cdef Py_ssize_t pos = place[0], start = pos, after
    cdef int code
    if pos >= end or depth <= 0:
        return not_read
    code = raw[pos]
    if code == 0:
        place[0] = pos + 1
        return described_at(raw, place, end, depth - 1)
    after = after_value(raw, pos, end)
    if after < 0:
        return not_read
    place[0] = after
    if code < 0xA0:
        return fixed_at(code, raw + pos + 1)
    pos += 5 if code & 0x10 else 2
    code &= 0xEF
    if code == 0xA1:
        return text_at(raw + pos, after - pos)
    if code == 0xA0:
        return PyBytes_FromStringAndSize(<const char *>raw + pos, after - pos)
    if code == 0xA3:
        if not is_ascii(raw + pos, after - pos):
            return not_read
        return new_text(symbol_class, text_at(raw + pos, after - pos))
    if code == 0xC0 or code == 0xC1:
        return items_at(raw, pos, after, raw[start] & 0x10 != 0, code == 0xC1, depth - 1)
    return not_read


cdef list known_names = [None] * 256
"""Names of properties that were decoded before, at places that follow from their bytes."""


cdef object name_at(const unsigned char *at, Py_ssize_t size):
    """Decode text that many events have: the name of a property."""
    cdef Py_ssize_t place
    if size == 0 or size > 64:
        return text_at(at, size)
    place = (at[0] + 7 * <Py_ssize_t>at[size - 1] + 31 * <Py_ssize_t>at[size // 2] + 57 * size) & 0xFF
    known = known_names[place]
    if known is not None and PyUnicode_GET_LENGTH(known) == size and memcmp(PyUnicode_DATA(known), at, size) == 0:
        return known
    found = text_at(at, size)
    if found is not not_read and PyUnicode_IS_COMPACT_ASCII(found):
        known_names[place] = found
    return found


cdef object described_at(const unsigned char *raw, Py_ssize_t *place, Py_ssize_t end, int depth):
    """Decode a descriptor and what it describes."""
    cdef int code = raw[place[0]] if place[0] < end else 0
    if code == 0 or code == 0x45 or code >= 0xC0:
        return not_read  # a descriptor that may have no hash
    descriptor = decoded(raw, place, end, depth)
    if descriptor is not_read:
        return not_read
    value = decoded(raw, place, end, depth)
    return not_read if value is not_read else described_class(descriptor, value)


cdef object items_at(const unsigned char *raw, Py_ssize_t pos, Py_ssize_t end, bint is_wide, bint is_map, int depth):
    """Decode a list or map whose count is at `pos`."""
    cdef int64_t count, place
    cdef int code
    if end - pos < (4 if is_wide else 1):
        return not_read
    count = size_at(raw + pos) if is_wide else raw[pos]
    pos += 4 if is_wide else 1
    if count > end - pos:
        return not_read
    if not is_map:
        items = []
        for place in range(count):
            item = decoded(raw, &pos, end, depth)
            if item is not_read:
                return not_read
            items.append(item)
        return items if pos == end else not_read
    if count & 1:
        return not_read
    entries = {}
    for place in range(0, count, 2):
        code = raw[pos] if pos < end else 0
        if code == 0 or code == 0x45 or code >= 0xC0 or (code == 0x98 and count > 2 * weak_keys):
            return not_read  # a key that may have no hash, or one that a peer can choose
        if code == 0xA1 and depth > 0 and end - pos > 1 and raw[pos + 1] <= end - pos - 2:
            key = name_at(raw + pos + 2, raw[pos + 1])
            pos += 2 + raw[pos + 1]
        else:
            key = decoded(raw, &pos, end, depth)
        if key is not_read:
            return not_read
        value = decoded(raw, &pos, end, depth)
        if value is not_read:
            return not_read
        entries[key] = value
    return entries if pos == end else not_read


cdef bint find_section(const unsigned char *raw, Py_ssize_t end, int wanted, Py_ssize_t *at, Py_ssize_t *after) noexcept:
    """Find the value of a section that a message has once: `sections.values_at`. False where the reference has to.

    Args:
        at: Set to where its value begins; -1 where there is none.
        after: Set to where it ends.
    """
    cdef Py_ssize_t pos = 0, following
    cdef int code, constructor, bit, seen = 0
    at[0] = -1
    while pos < end:
        if end - pos < 4 or raw[pos] != 0 or raw[pos + 1] != 0x53:
            return False
        code = raw[pos + 2]
        constructor = raw[pos + 3]
        following = after_value(raw, pos + 3, end)
        if following < 0:
            return False
        if code == 0x75:
            if constructor & 0xEF != 0xA0:
                return False
        elif code == 0x70 or code == 0x73 or code == 0x76:
            if constructor & 0xEF != 0xC0 and constructor != 0x45:
                return False
        elif code == 0x71 or code == 0x72 or code == 0x74 or code == 0x78:
            if constructor & 0xEF != 0xC1:
                return False
        elif code != 0x77:
            return False
        bit = 1 << (code - 0x70)
        if seen & bit and code != 0x75 and code != 0x76:
            return False
        seen |= bit
        if code == wanted:
            at[0] = pos + 3
            after[0] = following
        pos = following
    seen &= 0xE0  # the three kinds of bodies
    return seen & (seen - 1) == 0


cdef object section_value(message, int code):
    """Decode one section, which is a list or map: `sections.section_value`."""
    cdef Py_ssize_t at, after = 0
    cdef const unsigned char *raw
    if not PyBytes_CheckExact(message):
        return not_read
    raw = <const unsigned char *>PyBytes_AS_STRING(message)
    if not find_section(raw, PyBytes_GET_SIZE(message), code, &at, &after):
        return not_read
    if at < 0:
        return None
    return not_read if after - at > never_counted else decoded(raw, &at, after, section_depth)


cdef object standard_property(message, int wanted, bint as_text):
    """Decode one standard property: `message.decode_property`.

    Args:
        wanted: Its index.
        as_text: Whether to return the text of its value.
    """
    cdef Py_ssize_t at, after = 0, pos, following, item = -1, item_end = 0
    cdef int64_t count, place
    cdef const unsigned char *raw
    cdef bint is_wide
    if not PyBytes_CheckExact(message):
        return not_read
    raw = <const unsigned char *>PyBytes_AS_STRING(message)
    if not find_section(raw, PyBytes_GET_SIZE(message), 0x73, &at, &after):
        return not_read
    if at < 0 or raw[at] == 0x45:
        return None
    is_wide = raw[at] & 0x10 != 0
    pos = at + (5 if is_wide else 2)
    if after - at > never_counted or after - pos < (4 if is_wide else 1):
        return not_read
    count = size_at(raw + pos) if is_wide else raw[pos]
    pos += 4 if is_wide else 1
    if count > STANDARD:
        return not_read
    for place in range(count):
        if pos >= after:
            return not_read
        following = after_value(raw, pos, after)
        if following < 0:
            return not_read
        if place == wanted:
            item = pos
            item_end = following
        pos = following
    if pos != after:
        return not_read
    if item < 0:
        return None
    if as_text and raw[item] == 0xA3:
        return text_at(raw + item + 2, item_end - item - 2) if is_ascii(raw + item + 2, item_end - item - 2) else not_read
    found = decoded(raw, &item, item_end, section_depth - 1)
    return str(found) if as_text and found is not not_read and found is not None else found


def moment(int64_t milliseconds):
    """Make a datetime in UTC of milliseconds since 1970."""
    if not 0 <= milliseconds < 4_000_000_000_000:
        return python_moment(milliseconds)
    cdef int64_t seconds = milliseconds // 1000
    cdef int of_day = <int>(seconds % 86400)
    # The date of a day, by eras of 400 years that begin in March (Howard Hinnant, "chrono-compatible algorithms").
    cdef int day = <int>(seconds // 86400) + 719468
    cdef int era = day // 146097
    cdef int of_era = day - era * 146097
    cdef int year_of_era = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
    cdef int of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    cdef int from_march = (5 * of_year + 2) // 153
    cdef int month = from_march + 3 if from_march < 10 else from_march - 9
    return datetime_new(
        year_of_era + era * 400 + (1 if month <= 2 else 0), month, of_year - (153 * from_march + 2) // 5 + 1,
        of_day // 3600, of_day // 60 % 60, of_day % 60, <int>(milliseconds % 1000) * 1000, get_utc(),
    )


@cython.auto_pickle(False)
cdef class EncodedEvent:
    """The base of `ReceivedEvent` in the compiled build. Its names are those of the reference."""

    cdef public object _raw, _origin, _offset, _body, _properties, _values, _key
    cdef public int64_t _sequence_number, _enqueued
    cdef int body_at, body_size, key_at, key_size

    def __cinit__(self):
        self.body_at = -1
        self.key_at = UNKNOWN_KEY

    def __init__(self, raw, origin=None):
        self._raw = raw
        self._origin = origin
        self._offset = self._body = self._properties = self._values = None
        self.body_at = -1
        self.key_at = UNKNOWN_KEY

    cdef bint read(self) except -1:
        """Read the message in one walk. False, and nothing is changed, where the reference has to."""
        cdef Found found
        cdef const char *raw
        if not PyBytes_CheckExact(self._raw) or PyBytes_GET_SIZE(self._raw) > INT32_MAX:
            return False
        raw = PyBytes_AS_STRING(self._raw)
        if not find(<const unsigned char *>raw, PyBytes_GET_SIZE(self._raw), &found):
            return False
        try:
            offset = PyUnicode_DecodeUTF8(raw + found.offset_at, found.offset_size, NULL)
        except UnicodeDecodeError:
            return False
        self._sequence_number = found.sequence
        self._enqueued = found.time
        self.body_at = <int>found.body_at
        self.body_size = <int>found.body_size
        self.key_at = <int>found.key_at
        self.key_size = <int>found.key_size
        self._body = None
        self._key = unread_key
        self._offset = offset
        return True

    cdef int locate(self) except -1:
        """Read the message, if it was not read."""
        cdef bint is_read
        with cython.critical_section(self):
            is_read = self._offset is not None or self.read()
        if not is_read:
            references["EncodedEvent"]._scan(self)
        return 0

    cdef const char *part(self, int at, int size) noexcept:
        """Return where a part of the message begins; NULL where it has no such part."""
        if at < 0 or not PyBytes_CheckExact(self._raw) or <Py_ssize_t>at + size > PyBytes_GET_SIZE(self._raw):
            return NULL
        return PyBytes_AS_STRING(self._raw) + at

    @property
    def raw(self):
        """The encoded message, as received."""
        return self._raw

    @property
    def origin(self):
        """Identifies the partition from which a host delivered the event; None for other events."""
        return self._origin

    @property
    def sequence_number(self):
        """The event's sequence number in the partition."""
        if self._offset is None:
            self.locate()
        return self._sequence_number

    @property
    def offset(self):
        """The event's offset in the partition, an opaque text."""
        if self._offset is None:
            self.locate()
        return self._offset

    @property
    def enqueued_time(self):
        """When the service stored the event: a UTC time, to the millisecond."""
        if self._offset is None:
            self.locate()
        return moment(self._enqueued)

    @property
    def body(self):
        """The body as bytes; several data sections are joined.

        Raises:
            EventError: The body is not data; see `value`.
        """
        cdef const char *part
        if self._offset is None:
            self.locate()
        if self._body is not None:
            return self._body
        with cython.critical_section(self):
            part = self.part(self.body_at, self.body_size)
            if part != NULL and self._body is None:
                self._body = PyBytes_FromStringAndSize(part, self.body_size)
        return references["EncodedEvent"].body.fget(self) if part == NULL else self._body

    def _data(self):
        """Return the body that the scan finds, or that was read before; None where the general decoder has to."""
        cdef const char *part
        if self._offset is None:
            with cython.critical_section(self):
                if self._offset is None:
                    self.read()
        if self._offset is None:
            return references["EncodedEvent"]._data(self)
        with cython.critical_section(self):
            part = self.part(self.body_at, self.body_size)
            if part != NULL and self._body is None:
                self._body = PyBytes_FromStringAndSize(part, self.body_size)
        return self._body

    def body_as_str(self, encoding="utf-8"):
        """Return the body as text: data decoded, or a value that is text.

        Args:
            encoding: The encoding of data. Default: "utf-8".

        Raises:
            EventError: The body is not text in that encoding.
        """
        cdef const char *part
        if self._offset is None:
            self.locate()
        part = self.part(self.body_at, self.body_size)
        if part != NULL and type(self) is whole_event:  # a subclass may have another body
            if encoding == "utf-8":
                try:
                    return PyUnicode_DecodeUTF8(part, self.body_size, NULL)
                except UnicodeDecodeError:
                    pass
            self.body  # so that the reference does not decode the whole message
        return references["EncodedEvent"].body_as_str(self, encoding)

    @property
    def partition_key(self):
        """The partition key that the event was sent with; None if there was none."""
        cdef const char *part
        if self._offset is None:
            with cython.critical_section(self):
                if self._offset is None:
                    self.read()
        if self.key_at == NO_KEY:
            return None
        part = self.part(self.key_at, self.key_size)
        if part != NULL:
            try:
                return PyUnicode_DecodeUTF8(part, self.key_size, NULL)
            except UnicodeDecodeError:
                pass
        return references["EncodedEvent"].partition_key.fget(self)


    @property
    def properties(self):
        """The application properties; empty if there are none."""
        found = self._properties
        if found is None:
            found = section_value(self._raw, 0x74)
            if found is not_read:
                return references["EncodedEvent"].properties.fget(self)
            found = self._properties = {} if found is None else found
        return found

    cdef object kept(self, name):
        """Return what was read before under this name; `not_read` if it was not."""
        values = self._values
        return (<dict>values).get(name, not_read) if PyDict_CheckExact(values) else not_read

    cdef object keep(self, name, found):
        """Keep what was read."""
        if not PyDict_CheckExact(self._values):
            self._values = {}
        (<dict>self._values)[name] = found
        return found

    cdef object standard(self, int place, bint as_text):
        """Return a standard property; `not_read` where the reference has to."""
        found = self.kept(place)
        if found is not_read:
            found = standard_property(self._raw, place, as_text)
            if found is not not_read:
                self.keep(place, found)
        return found

    @property
    def message_id(self):
        """Text, a number, a UUID or bytes, as the sender chose; None if the sender set none."""
        found = self.standard(MESSAGE_ID, False)
        return references["EncodedEvent"].message_id.fget(self) if found is not_read else found

    @property
    def correlation_id(self):
        """Text, a number, a UUID or bytes, as the sender chose; None if the sender set none."""
        found = self.standard(CORRELATION_ID, False)
        return references["EncodedEvent"].correlation_id.fget(self) if found is not_read else found

    @property
    def content_type(self):
        """The MIME type of the body; None if the sender set none."""
        found = self.standard(CONTENT_TYPE, True)
        return references["EncodedEvent"].content_type.fget(self) if found is not_read else found

    @property
    def _content_encoding(self):
        """What the body is encoded with; None if the sender set nothing."""
        found = self.standard(CONTENT_ENCODING, True)
        return references["EncodedEvent"]._content_encoding.fget(self) if found is not_read else found

    @property
    def system_properties(self):
        """The message annotations, and the standard properties that are set, by their AMQP names."""
        found = self.kept("system_properties")
        if found is not_read:
            annotations = section_value(self._raw, 0x72)
            standard = section_value(self._raw, 0x73)
            if annotations is not_read or standard is not_read or (standard is not None and len(standard) > STANDARD):
                return references["EncodedEvent"].system_properties.fget(self)
            found = {}
            if annotations is not None:
                for key, value in (<dict>annotations).items():
                    found[str(key)] = value
            if standard is not None:
                add_named(<dict>found, system_names, <list>standard)
            self.keep("system_properties", found)
        return found

    def _copied(self):
        """Return an event to send with what the message holds: whatever a subclass returns as body or properties."""
        cdef PlainEventData copy
        payload = self._data()
        properties = self._properties
        if properties is None:
            properties = section_value(self._raw, 0x74)
        standard = section_value(self._raw, 0x73)
        if (
            not PyBytes_CheckExact(payload) or standard is not_read
            or not (properties is None or PyDict_CheckExact(properties))
            or (standard is not None and len(standard) > STANDARD)
        ):
            return references["EncodedEvent"]._copied(self)
        copy = event_data.__new__(event_data)
        copy._payload = payload
        if properties:
            copy._properties = PyDict_Copy(properties)
        if standard:
            named = {}
            add_named(<dict>named, standard_names, <list>standard)
            copy.standard = named or None
        return copy


cdef int add_named(dict to, tuple names, list values) except -1:
    """Put values under names, but for those that are None."""
    cdef Py_ssize_t place
    for place in range(min(len(names), len(values))):
        if values[place] is not None:
            to[names[place]] = values[place]
    return 0


# ------------------------------------------- amqp/codec.py, amqp/message.py: encoding the usual types of properties

# A function here returns False where the reference has to encode: a value is of another type, a subclass included, or
# cannot be encoded. None of them runs code of users, who could change what is being read.

cdef enum:
    SHORT = 512  # bytes that are encoded without asking for memory
    MAP_HEAD = 12  # bytes before the entries of the largest map that is a section; 6 of a small one

cdef type datetime_class = None
cdef tuple standard_names = (), system_names = ()
cdef frozenset standard_set = frozenset()
cdef frozenset id_names = frozenset(("message_id", "correlation_id"))

cdef const char *STANDARD_KINDS = b"ibvsviyyttsus"
"""By field: i is an id, b binary, v any value, s text, y a symbol, t a time, u a uint."""


def encode_properties(type datetimes not None, tuple names not None):
    """Set what properties are encoded with.

    Args:
        datetimes: `datetime.datetime`.
        names: The fields of the properties section, in order.
    """
    global datetime_class, standard_names, standard_set, system_names
    if len(names) != STANDARD:
        raise ValueError("the properties section has another number of fields")
    datetime_class, standard_names, standard_set = datetimes, names, frozenset(names)
    system_names = tuple(name.replace("_", "-") for name in names)


cdef struct Output:
    # Encoded bytes: in `short_data` while they fit there.
    unsigned char *data
    Py_ssize_t size, room
    unsigned char short_data[SHORT]


cdef inline void open_output(Output *to) noexcept:
    to.data = to.short_data
    to.size = 0
    to.room = SHORT


cdef inline void close_output(Output *to) noexcept:
    if to.data != to.short_data:
        PyMem_Free(to.data)


cdef unsigned char *room_for(Output *to, Py_ssize_t size) except NULL:
    """Make room for more bytes, which count as written, and return where they go."""
    cdef Py_ssize_t room
    cdef unsigned char *moved
    if size > to.room - to.size:
        if size > PY_SSIZE_T_MAX // 4 - to.room:
            raise MemoryError
        room = 2 * to.room + size
        moved = <unsigned char *>PyMem_Realloc(NULL if to.data == to.short_data else to.data, room)
        if moved == NULL:
            raise MemoryError
        if to.data == to.short_data:
            memcpy(moved, to.short_data, to.size)
        to.data = moved
        to.room = room
    to.size += size
    return to.data + to.size - size


cdef bytes joined(bytes before, Output *to, bytes after):
    """Return what was written between other bytes."""
    cdef Py_ssize_t first = PyBytes_GET_SIZE(before), last = PyBytes_GET_SIZE(after)
    if first > PY_SSIZE_T_MAX // 4 or last > PY_SSIZE_T_MAX // 4 or to.size > PY_SSIZE_T_MAX // 4:
        raise MemoryError
    made = PyBytes_FromStringAndSize(NULL, first + to.size + last)
    cdef char *at = PyBytes_AS_STRING(made)
    memcpy(at, PyBytes_AS_STRING(before), first)
    memcpy(at + first, to.data, to.size)
    memcpy(at + first + to.size, PyBytes_AS_STRING(after), last)
    return made


cdef inline void put_number(unsigned char *at, uint64_t number, int width) noexcept:
    """Write a number in so many bytes, the highest first."""
    while width:
        width -= 1
        at[width] = <unsigned char>number
        number >>= 8


cdef int add_number(Output *to, int constructor, uint64_t number, int width) except -1:
    cdef unsigned char *at = room_for(to, 1 + width)
    at[0] = <unsigned char>constructor
    put_number(at + 1, number, width)
    return 0


cdef bint add_sized(Output *to, int constructor, const void *data, Py_ssize_t size) except -1:
    """Write binary or text with its size: `codec._sized`."""
    if size < 256:
        add_number(to, constructor, size, 1)
    elif <uint64_t>size > UINT32_MAX:
        return False
    else:
        add_number(to, constructor + 0x10, size, 4)
    if size:
        memcpy(room_for(to, size), data, size)
    return True


cdef bint add_text(Output *to, text) except -1:
    if PyUnicode_IS_COMPACT_ASCII(text):
        return add_sized(to, 0xA1, PyUnicode_DATA(text), PyUnicode_GET_LENGTH(text))
    try:
        encoded = PyUnicode_AsUTF8String(text)
    except UnicodeEncodeError:
        return False
    return add_sized(to, 0xA1, PyBytes_AS_STRING(encoded), PyBytes_GET_SIZE(encoded))


cdef bint add_unsigned(Output *to, number, bint is_long) except -1:
    """Write a ulong, or a uint: `codec._ulong`, `codec._uint`."""
    cdef uint64_t value
    try:
        value = PyLong_AsUnsignedLongLong(number)
    except OverflowError:
        return False
    if value > UINT32_MAX and not is_long:
        return False
    if value == 0:
        add_number(to, 0x44 if is_long else 0x43, 0, 0)
    elif value < 256:
        add_number(to, 0x53 if is_long else 0x52, value, 1)
    else:
        add_number(to, 0x80 if is_long else 0x70, value, 8 if is_long else 4)
    return True


cdef bint add_moment(Output *to, moment) except -1:
    """Write a datetime in UTC: `Timestamp.from_datetime`."""
    if datetime_tzinfo(moment) is not get_utc():
        return False
    # The days since 1970 (Howard Hinnant, "chrono-compatible algorithms"); a year here begins in March.
    cdef int64_t month = datetime_month(moment), year = datetime_year(moment) - (1 if month <= 2 else 0)
    cdef int64_t era = year // 400, of_era = year - era * 400
    cdef int64_t of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + datetime_day(moment) - 1
    cdef int64_t days = era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468
    cdef int64_t seconds = (days * 24 + datetime_hour(moment)) * 3600 + datetime_minute(moment) * 60
    seconds += datetime_second(moment)
    add_number(to, 0x83, <uint64_t>(seconds * 1000 + datetime_microsecond(moment) // 1000), 8)
    return True


cdef bint add_uuid(Output *to, value) except -1:
    number = value.int
    if not PyLong_CheckExact(number):
        return False
    try:
        high, low = PyLong_AsUnsignedLongLong(number >> 64), PyLong_AsUnsignedLongLong(number & 0xFFFFFFFFFFFFFFFF)
    except OverflowError:
        return False
    add_number(to, 0x98, high, 8)
    put_number(room_for(to, 8), low, 8)
    return True


cdef bint add_value(Output *to, value) except -1:
    """Write a value: `codec.encode`."""
    cdef int64_t number
    cdef int overflow = 0
    cdef double real
    cdef uint64_t bits
    if PyUnicode_CheckExact(value):
        return add_text(to, value)
    if value is None or value is True or value is False:
        add_number(to, 0x40 if value is None else 0x41 if value is True else 0x42, 0, 0)
    elif PyLong_CheckExact(value):
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow:
            return False
        if -128 <= number < 128:
            add_number(to, 0x55, <uint64_t>number, 1)
        else:
            add_number(to, 0x81, <uint64_t>number, 8)
    elif PyFloat_CheckExact(value):
        real = PyFloat_AS_DOUBLE(value)
        memcpy(&bits, &real, 8)
        add_number(to, 0x82, bits, 8)
    elif PyBytes_CheckExact(value):
        return add_sized(to, 0xA0, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
    elif type(value) is uuid_class:
        return add_uuid(to, value)
    elif type(value) is datetime_class:
        return add_moment(to, value)
    else:
        return add_amqp_value(to, value)
    return True


cdef bint add_signed(Output *to, value, int constructor, int width) except -1:
    """Write a number of so many bytes. False where it does not fit."""
    cdef int overflow = 0
    cdef int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow), most = INT64_MAX >> (64 - 8 * width)
    if overflow or number > most or number < -most - 1:
        return False
    add_number(to, constructor, <uint64_t>number, width)
    return True


cdef bint add_symbol(Output *to, int constructor, text) except -1:
    """Write ASCII text, which may be of a subclass."""
    if not PyUnicode_IS_ASCII(text):
        return False
    return add_sized(to, constructor, PyUnicode_DATA(text), PyUnicode_GET_LENGTH(text))


cdef bint add_amqp_value(Output *to, value) except -1:
    """Write a value of one of the classes in `amqp/types.py`, as decoding gives them."""
    cdef type kind = type(value)
    cdef int64_t number
    cdef int overflow = 0
    cdef float single
    cdef uint32_t bits
    if kind is symbol_class:
        return add_symbol(to, 0xA3, value)
    if kind is timestamp_class:
        return add_signed(to, value, 0x83, 8)
    if kind is uint_class:
        return add_unsigned(to, value, False)
    if kind is ulong_class:
        return add_unsigned(to, value, True)
    if kind is int_class or kind is byte_class:
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if not overflow and -128 <= number < 128:
            add_number(to, 0x54 if kind is int_class else 0x51, <uint64_t>number, 1)
            return True
        return kind is int_class and add_signed(to, value, 0x71, 4)
    if kind is short_class:
        return add_signed(to, value, 0x61, 2)
    if kind is ubyte_class or kind is ushort_class:
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow or not 0 <= number <= (0xFF if kind is ubyte_class else 0xFFFF):
            return False
        add_number(to, 0x50 if kind is ubyte_class else 0x60, <uint64_t>number, 1 if kind is ubyte_class else 2)
        return True
    if kind is float_class:
        single = <float>PyFloat_AS_DOUBLE(value)
        if single - single != 0:
            return False  # NaN, infinity, or too large
        memcpy(&bits, &single, 4)
        add_number(to, 0x72, bits, 4)
        return True
    if kind is char_class and PyUnicode_GET_LENGTH(value) == 1:
        add_number(to, 0x73, PyUnicode_READ_CHAR(value, 0), 4)
        return True
    if kind is decimal32_class:
        return add_decimal(to, 0x74, value, 4)
    if kind is decimal64_class:
        return add_decimal(to, 0x84, value, 8)
    return kind is decimal128_class and add_decimal(to, 0x94, value, 16)


cdef bint add_decimal(Output *to, int constructor, value, Py_ssize_t width) except -1:
    if PyBytes_GET_SIZE(value) != width:
        return False
    add_number(to, constructor, 0, 0)
    memcpy(room_for(to, width), PyBytes_AS_STRING(value), width)
    return True


cdef bint end_section(Output *to, Py_ssize_t start, int code, int constructor, uint64_t count) except -1:
    """Write the head of a section, for which there is room at `start`: `sections.section` of a map or list."""
    cdef unsigned char *head = to.data + start
    cdef uint64_t size = to.size - start - MAP_HEAD
    head[0], head[1], head[2] = 0, 0x53, <unsigned char>code
    if size < 255 and count < 256:
        head[3], head[4], head[5] = <unsigned char>constructor, <unsigned char>(size + 1), <unsigned char>count
        memmove(head + 6, head + MAP_HEAD, size)
        to.size -= MAP_HEAD - 6
    elif size > UINT32_MAX - 4 or count > UINT32_MAX:
        return False
    else:
        head[3] = <unsigned char>(constructor + 0x10)
        put_number(head + 4, size + 4, 4)
        put_number(head + 8, count, 4)
    return True


cdef bint add_map(Output *to, int code, dict entries) except -1:
    """Write a section that is a map with texts as keys."""
    cdef Py_ssize_t start = to.size
    cdef uint64_t count = 0
    room_for(to, MAP_HEAD)
    with cython.critical_section(entries):
        for key, value in entries.items():
            if not PyUnicode_CheckExact(key) or not add_text(to, key) or not add_value(to, value):
                return False
            count += 2
    return end_section(to, start, code, 0xC1, count)


cdef bint add_field(Output *to, char kind, value) except -1:
    """Write a field of the properties section that is set: `message.listed`."""
    if kind == b"s":
        return add_symbol(to, 0xA1, value) if type(value) is symbol_class else (
            PyUnicode_CheckExact(value) and add_text(to, value)
        )
    if kind == b"y":
        return (PyUnicode_CheckExact(value) or type(value) is symbol_class) and add_symbol(to, 0xA3, value)
    if kind == b"b" and not PyBytes_CheckExact(value):
        return False
    if kind == b"t":
        if type(value) is timestamp_class:
            return add_signed(to, value, 0x83, 8)
        return type(value) is datetime_class and add_moment(to, value)
    if kind == b"u":
        return (PyLong_CheckExact(value) or type(value) is uint_class) and add_unsigned(to, value, False)
    if kind == b"i":
        if PyLong_CheckExact(value):
            return add_unsigned(to, value, True)
        if not (PyUnicode_CheckExact(value) or PyBytes_CheckExact(value) or type(value) in (uuid_class, ulong_class)):
            return False
    return add_value(to, value)


cdef bint add_standard(Output *to, dict given) except -1:
    """Write the properties section."""
    cdef Py_ssize_t start = to.size, size = MAP_HEAD, found = 0
    cdef int place, count = 0
    cdef unsigned char *empty
    with cython.critical_section(given):
        for key in given:
            if not PyUnicode_CheckExact(key):
                return False
        room_for(to, MAP_HEAD)
        for place in range(STANDARD):
            if found == len(given):
                break
            name = standard_names[place]
            if name not in given:
                add_number(to, 0x40, 0, 0)
                continue
            found += 1
            value = given[name]
            if value is None:
                add_number(to, 0x40, 0, 0)
                continue
            if not add_field(to, STANDARD_KINDS[place], value):
                return False
            size = to.size - start
            count = place + 1
        if found != len(given):
            return False
    to.size = start + size  # without what is not set at the end
    if count:
        return end_section(to, start, 0x73, 0xC0, count)
    to.size = start
    empty = room_for(to, 4)
    empty[0], empty[1], empty[2], empty[3] = 0, 0x53, 0x73, 0x45
    return True


# --------------------------------------------------------------------------- eventhubs/events.py: an event to send


@cython.auto_pickle(False)
cdef class PlainEventData:
    """The base of `EventData` in the compiled build."""

    cdef public object _body, _payload, _properties, _published_number, standard

    def __init__(self, *given, **named):
        if len(given) == 1 and not named and PyBytes_CheckExact(given[0]):
            self._payload = given[0]
            self._body = self._properties = self.standard = self._published_number = None
        elif len(given) != 1 or not self.begin(given[0], <dict>named):
            references["PlainEventData"].__init__(self, *given, **named)

    cdef bint begin(self, body, dict named) except -1:
        """Set the attributes. False, and nothing is done, where the reference has to."""
        cdef object properties = None
        if named:
            properties = named.get("properties")
            if properties is not None:
                if not PyDict_CheckExact(properties):
                    return False
                properties = PyDict_Copy(properties) or None
                if properties is not None:
                    for name in <dict>properties:
                        if not PyUnicode_Check(name):
                            return False
            for name in named:
                if name not in standard_set and name != "properties":
                    return False
                if name in id_names and not PyUnicode_CheckExact(named[name]):
                    return False  # not every type is one of ids
        if PyUnicode_CheckExact(body):
            try:
                body = PyUnicode_AsUTF8String(body)
            except UnicodeEncodeError:
                return False
        elif not PyBytes_CheckExact(body):
            return False
        if named:
            named.pop("properties", None)
        self._payload = body
        self._properties = properties
        self.standard = named or None
        self._body = self._published_number = None
        return True

    def encode(self, partition_key=None):
        """Encode the event as one AMQP message.

        Args:
            partition_key: The partition key to annotate it with; None for no key. Default: None.

        Raises:
            EventError: A property or the body has a type or value that AMQP cannot encode.
        """
        cdef Output to
        encoded = None
        if partition_key is None:
            open_output(&to)
            try:
                if self.add_head(&to):
                    encoded = joined(b"", &to, self._payload)
            finally:
                close_output(&to)
        return references["PlainEventData"].encode(self, partition_key) if encoded is None else encoded

    cdef bint add_head(self, Output *to) except -1:
        """Write what stands before the bytes of the body: `EventData.encode_head`. False where the reference has to."""
        cdef unsigned char *head
        cdef Py_ssize_t size
        if not PyBytes_CheckExact(self._payload):
            return False
        standard, properties = self.standard, self._properties
        if standard is not None and not (PyDict_CheckExact(standard) and add_standard(to, standard)):
            return False
        if properties is not None:
            if not PyDict_CheckExact(properties):
                return False
            if properties and not add_map(to, 0x74, properties):
                return False
        size = PyBytes_GET_SIZE(self._payload)
        if <uint64_t>size > UINT32_MAX:
            return False
        head = room_for(to, 3)
        head[0], head[1], head[2] = 0, 0x53, 0x75
        add_number(to, 0xA0 if size < 256 else 0xB0, size, 1 if size < 256 else 4)
        return True

    cdef tuple parts(self, bytes before, bint is_numbered):
        """Encode it in two pieces: `sealing.pieces_of`. None where the reference has to."""
        cdef Output to
        cdef bytes rest
        cdef Py_ssize_t size
        if not before and self.is_plain():
            return (numbered_data_heads if is_numbered else data_heads)[PyBytes_GET_SIZE(self._payload)], self._payload
        open_output(&to)
        try:
            size = PyBytes_GET_SIZE(before)
            if size and not is_numbered:
                memcpy(room_for(&to, size), PyBytes_AS_STRING(before), size)
            if not self.add_head(&to):
                return None
            if not is_numbered:
                size = to.size + PyBytes_GET_SIZE(self._payload)
                return None if <uint64_t>size > UINT32_MAX else (joined(event_heads[size], &to, b""), self._payload)
            rest = joined(b"", &to, self._payload)
        finally:
            close_output(&to)
        if not before:
            return numbered_event_heads[PyBytes_GET_SIZE(rest)], rest
        annotated = python_with_room(before)
        return event_heads[len(annotated) + PyBytes_GET_SIZE(rest)] + annotated, rest

    cdef bint is_plain(self):
        """Return whether the event is bytes and no more."""
        return (
            self.standard is None
            and (self._properties is None or (PyDict_CheckExact(self._properties) and not self._properties))
            and PyBytes_CheckExact(self._payload)
        )


# ----------------------------------- eventhubs/sealing.py, producer/packing.py, producer/batch.py: events into a message

cdef object python_pieces_of = None, python_with_room = None, envelope_head = None
cdef object data_heads = None, numbered_data_heads = None, event_heads = None, numbered_event_heads = None
cdef bytes first_key = b""
cdef Py_ssize_t id_place = 0
cdef int64_t number_count = 1
cdef object python_number_events = None
cdef object open_state = None


def seal_events(to_pieces, to_message, bytes key not None, Py_ssize_t id_at, int64_t numbers):
    """Set what the functions below share with `eventpump.eventhubs.sealing`.

    Args:
        to_pieces: The reference of `pieces_of`.
        to_message: The reference of `number_events`.
        key: The name of the first annotation in that room.
        id_at: Where the producer id stands, counted from there.
        numbers: How many numbers there are.
    """
    global python_pieces_of, python_number_events, first_key, id_place, number_count
    if id_at < 0:
        raise ValueError("the place must lie behind the name")
    python_pieces_of, python_number_events = to_pieces, to_message
    first_key, id_place, number_count = key, id_at, numbers


def begin_events(of_data, of_data_with_room, of_events, of_events_with_room, of_key, to_room):
    """Set what events begin with.

    Args:
        of_data: What stands before the payload of an event that is a data section and no more, by the payload's size;
            and with room for numbers.
        of_events: What stands before an encoded event, by its size; and with room for numbers.
        of_key: Encodes what states a partition key (`envelope.envelope_head`).
        to_room: Adds room for numbers to that.
    """
    global data_heads, numbered_data_heads, event_heads, numbered_event_heads, envelope_head, python_with_room
    data_heads, numbered_data_heads, event_heads, numbered_event_heads = (
        of_data, of_data_with_room, of_events, of_events_with_room
    )
    envelope_head, python_with_room = of_key, to_room


def fill_batches(is_open):
    """Set the state of a batch that takes events."""
    global open_state
    open_state = is_open


def pieces_of(event, *, idempotent=False, stamped=False, before=b""):
    """See `eventpump.eventhubs.sealing.pieces_of`."""
    if not stamped and type(event) is event_data and PyBytes_CheckExact(before):
        parts = (<PlainEventData>event).parts(before, idempotent)
        if parts is not None:
            return parts
    return python_pieces_of(event, idempotent=idempotent, stamped=stamped, before=before)


@cython.auto_pickle(False)
cdef class PlainPacker:
    """The base of `BatchPacker` in the compiled build."""

    cdef public object _idempotent, _oversized, _stamped, partition_key
    cdef public list _pieces
    cdef public int64_t limit, size

    def add(self, head, rest):
        """Add an event to the message being packed.

        Args:
            head: The first piece of the event (see `eventhubs.sealing.pieces_of`).
            rest: The other piece.

        Returns:
            Whether it was added; False, if it does not fit any more.

        Raises:
            EventTooLargeError: It does not fit an empty message either, and `oversized` is not set.
        """
        if PyBytes_CheckExact(head) and PyBytes_CheckExact(rest) and self.append(head, rest):
            return True
        return references["PlainPacker"].add(self, head, rest)

    cdef bint append(self, bytes head, bytes rest) except -1:
        """Add an event. False, and nothing is changed, where it does not fit."""
        cdef int64_t size = PyBytes_GET_SIZE(head) + PyBytes_GET_SIZE(rest)
        if self._pieces is None or self.limit < size or self.size > self.limit - size:
            return False
        self._pieces.append(head)
        self._pieces.append(rest)
        self.size += size
        return True


@cython.auto_pickle(False)
cdef class PlainBatch:
    """The base of `EventBatch` in the compiled build."""

    cdef public object _events, is_idempotent, is_stamped, partition_key, _state, _encode, _packer, _sealed

    def try_add(self, event):
        """Add an event.

        Returns:
            False, and nothing added, where it does not fit any more.

        Raises:
            EventTooLargeError: It would not fit an empty batch either.
            EventError: It is no `EventData`, cannot be encoded, or carries a number already; or the batch is on its way
                or published.
        """
        cdef bytes head = None, rest
        cdef bint is_numbered
        if (
            type(event) is event_data
            and self._state is open_state
            and self._encode is None  # a function that makes the event to send of a user's
            and not self.is_stamped
            and isinstance(self._packer, PlainPacker)
        ):
            is_numbered = self.is_idempotent
            if not (is_numbered and (<PlainEventData>event)._published_number is not None):
                if self.partition_key is None and (<PlainEventData>event).is_plain():
                    rest = (<PlainEventData>event)._payload
                    head = (numbered_data_heads if is_numbered else data_heads)[PyBytes_GET_SIZE(rest)]
                else:
                    before = b"" if self.partition_key is None else envelope_head(self.partition_key)
                    parts = (<PlainEventData>event).parts(before, is_numbered)
                    if parts is not None:
                        head, rest = parts
                if head is not None and (<PlainPacker>self._packer).append(head, rest):
                    if is_numbered:
                        self._events.append(event)
                    self._sealed = None
                    return True
        return references["PlainBatch"].try_add(self, event)


cdef Py_ssize_t last_key(const char *head, Py_ssize_t size) noexcept:
    """Return where the name of the first annotation stands last in a head; -1 where it does not."""
    cdef Py_ssize_t width = PyBytes_GET_SIZE(first_key), at = size - width
    while at >= 0:
        if memcmp(head + at, PyBytes_AS_STRING(first_key), width) == 0:
            return at
        at -= 1
    return -1


def number_events(pieces, bytes stamp not None, int64_t first):
    """See `eventpump.eventhubs.sealing.number_events`."""
    cdef tuple parts = tuple(pieces)
    cdef Py_ssize_t count = len(parts) // 2, width = PyBytes_GET_SIZE(stamp), total = 0, place, size, at = -1
    cdef int64_t start = first
    cdef bytes head, known = None
    cdef char *to
    if len(parts) % 2 or not 0 <= first < number_count:
        return python_number_events(pieces, stamp, first)
    for each in parts:
        if not PyBytes_CheckExact(each) or PyBytes_GET_SIZE(each) > PY_SSIZE_T_MAX - total:
            return python_number_events(pieces, stamp, first)
        total += PyBytes_GET_SIZE(each)
    message = PyBytes_FromStringAndSize(NULL, total)
    to = PyBytes_AS_STRING(message)
    for place in range(0, 2 * count, 2):
        head = parts[place]
        size = PyBytes_GET_SIZE(head)
        if head is not known and head != known:  # events of one size have one head
            at = last_key(PyBytes_AS_STRING(head), size)
            if at < 0 or size - at < id_place + width + 4:
                return python_number_events(pieces, stamp, start)
            at += id_place
            known = head
        memcpy(to, PyBytes_AS_STRING(head), size)
        memcpy(to + at, PyBytes_AS_STRING(stamp), width)
        to[at + width] = <char>(first >> 24)
        to[at + width + 1] = <char>(first >> 16)
        to[at + width + 2] = <char>(first >> 8)
        to[at + width + 3] = <char>first
        to += size
        size = PyBytes_GET_SIZE(parts[place + 1])
        memcpy(to, PyBytes_AS_STRING(parts[place + 1]), size)
        to += size
        first = first + 1 if first + 1 < number_count else 0
    return message


# ----------------------------------- producer/accumulator.py, producer/intake.py: accepting an event of a buffered producer

cdef object hash_router = None, keyed_head = None
cdef type whole_receipt = None


def accept_events(router_class not None, type receipt_class not None, to_head not None):
    """Set what `Intake` works with.

    Args:
        router_class: `HashRouter`.
        receipt_class: `DeliveryReceipt`.
        to_head: Encodes what stands before an event that has a key.
    """
    global hash_router, whole_receipt, keyed_head
    if not issubclass(receipt_class, PlainReceipt):
        raise TypeError("the class of receipts must be based on that of the core")
    hash_router, whole_receipt, keyed_head = router_class, receipt_class, to_head


@cython.auto_pickle(False)
cdef class PlainReceipt:
    """The base of `DeliveryReceipt` in the compiled build."""

    cdef public object _batch
    cdef public Py_ssize_t _index

    def __init__(self, batch, Py_ssize_t index):
        self._batch = batch
        self._index = index


@cython.auto_pickle(False)
cdef class PlainRoom:
    """The base of `BufferRoom` in the compiled build."""

    cdef public dict _held
    cdef public int64_t _free_bytes, _free_events, _own_bytes, _own_events, _partition_bytes, _partition_events

    def reserve(self, partition_id, int64_t size):
        """Reserve room for an event.

        Args:
            partition_id: The partition of the event.
            size: The size of the event, in bytes.

        Returns:
            Whether it was reserved; False if there is no room now.

        Raises:
            KeyError: There is no such partition.
        """
        return self.take(partition_id, size)

    cdef bint take(self, partition_id, int64_t size) except -1:
        if self._held is None or not 0 <= size <= INT64_MAX >> 1:
            raise ValueError("this is no size of an event")
        cdef list held = (<object>self._held)[partition_id]  # as of a dict alone, the error would lack a key that is None
        cdef int64_t events, before, after, more_bytes = 0, own = self._own_bytes
        cdef bint more_events
        if held is None or len(held) != 2:
            raise ValueError("this is no partition's room")
        events, before = held[0], held[1]
        after = before + size
        more_events = events >= self._own_events
        if after > own:
            more_bytes = after - (before if before > own else own)
        if events and (
            events >= self._partition_events
            or after > self._partition_bytes
            or (more_events and self._free_events < 1)
            or (more_bytes and more_bytes > self._free_bytes)
        ):
            return False
        self._free_events -= more_events
        self._free_bytes -= more_bytes
        held[0] = events + 1
        held[1] = after
        return True


@cython.auto_pickle(False)
cdef class PlainIntake:
    """The base of `Intake` in the compiled build."""

    cdef public object _add, _encode, _is_idempotent, _is_stamping, _outbox, _queue, _router, _runner, _time, refused
    cdef public dict _lanes
    cdef public set _held
    cdef public tuple _partition_ids
    cdef public PlainRoom _room
    cdef public int64_t _most, blocked

    def accept(self, event, partition_id, partition_key, encoded=None):
        """Accept an event at once.

        Args:
            encoded: The event's pieces, where it is encoded already.

        Returns:
            Its receipt. None where it has to wait, or is no event: then nothing was done; or there is no room, and
            `refused` has what was done for it.

        Raises:
            EventError: It cannot be encoded.
            ConfigurationError: The key is too long, or there is no such partition.
        """
        cdef int64_t size
        cdef Py_ssize_t count, index
        cdef PlainPacker batch
        cdef set held = None if encoded is not None else self._held  # what is encoded is held already
        if self.blocked or not isinstance(event, event_data) or self._queue.wanting:
            return None
        if self._runner._thread_id != PyThread_get_thread_ident():
            return None  # another thread or loop: the caller will see
        now = self._time()
        if now >= self._outbox.yield_at:
            return None
        if self._lanes is None or self._partition_ids is None or self._room is None:
            raise TypeError("a part of what accepts events is missing")
        if held is not None and id(event) in held:
            self.require_free(event)
        parts = encoded
        if (
            encoded is None
            and self._encode is None
            and not self._is_stamping
            and type(event) is event_data
            and not (self._is_idempotent and (<PlainEventData>event)._published_number is not None)
        ):
            before = b"" if partition_key is None else keyed_head(partition_key)
            parts = (<PlainEventData>event).parts(before, self._is_idempotent)
        head, rest = self.encode(event, partition_key) if parts is None else parts
        size = len(head) + len(rest)
        count = len(self._partition_ids)
        if partition_id is None and partition_key is None and type(self._router) is hash_router and count > 0:
            index = self._router._next % count
            self._router._next = index + 1
            lane = self._lanes[self._partition_ids[index]]
        elif partition_id is None and partition_key is not None and type(self._router) is hash_router:
            # An index from a user's function may be anything.
            chosen = (<object>self._partition_ids)[self._router._partition_for_key(partition_key, count)]
            lane = self._lanes.get(chosen)
            if lane is None:
                lane = self.route(event, partition_id, partition_key)
        else:
            lane = self.route(event, partition_id, partition_key)
        if not self._room.take(lane.partition_id, size):
            self.refused = head, rest, lane
            return None
        open_batch = lane.filling
        if isinstance(open_batch, PlainPacker) and PyBytes_CheckExact(head) and PyBytes_CheckExact(rest):
            batch = open_batch
            events = batch.events
            # Else it begins or ends a batch.
            if (
                PyList_CheckExact(events)
                and len(<list>events) + 1 < self._most
                and batch.size < batch.limit - size
                and batch.append(head, rest)
            ):
                (<list>events).append(event)
                if held is not None:
                    held.add(id(event))
                return receipt_of(batch, len(<list>events) - 1)
        batch = self._add(lane, event, head, rest, now)
        if held is not None:
            held.add(id(event))
        return receipt_of(batch, len(batch.events) - 1)


cdef inline object receipt_of(batch, Py_ssize_t index):
    cdef PlainReceipt receipt = whole_receipt.__new__(whole_receipt)
    receipt._batch = batch
    receipt._index = index
    return receipt


# ------------------------------------------------------- core/: the cache of a partition, its cursors, credit, account

cdef type whole_chunk = None
cdef int64_t shared_chunk = 0, first_ramp = 0, unknown_size = 0, sizes_kept = 1


def hold_events(type chunk_class not None, int64_t shared):
    """Set what the cache takes from `core/cache.py`.

    Args:
        chunk_class: The class of chunks, based on `PlainChunk`.
        shared: The most messages in a chunk that several cursors read.
    """
    global whole_chunk, shared_chunk
    if not issubclass(chunk_class, PlainChunk):
        raise TypeError("the class of chunks must be based on that of the core")
    whole_chunk, shared_chunk = chunk_class, shared


def grant_credit(int64_t start, int64_t unknown, int64_t kept):
    """Set the constants of `core/credit.py`.

    Args:
        start: The credit of a link before any size of a message is known.
        unknown: What a message counts for then, in bytes.
        kept: How many messages the recent maximum covers at least.
    """
    global first_ramp, unknown_size, sizes_kept
    if kept < 1:
        raise ValueError("the maximum is of a message at least")
    first_ramp, unknown_size, sizes_kept = start, unknown, kept


@cython.auto_pickle(False)
cdef class PlainHand:
    """The base of `_Hand` in the compiled build."""

    cdef public int64_t first, size, until
    cdef public list pieces


@cython.auto_pickle(False)
cdef class PlainChunk:
    """The base of `_Chunk` in the compiled build."""

    cdef public list raw
    cdef public object items
    cdef public int64_t size


@cython.auto_pickle(False)
cdef class PlainCache:
    """The base of `EventCache` in the compiled build."""

    cdef public object _ahead, _chunks, _found, _index, _number, _wrap
    cdef public list _cursors
    cdef public dict _hands
    cdef public int64_t _found_from, _found_until, _start, _unread_by, count, end, in_hand, size

    def append(self, list batch not None, int64_t size):
        """Add a batch of so many bytes; return the streams to wake. The cache owns the list from now on."""
        return self.add(batch, size)

    cdef object add(self, list batch, int64_t size):
        cdef Py_ssize_t count = len(batch)
        if self._index is not None or self._chunks or not 0 < count <= shared_chunk:
            return self._append(batch, size)
        cdef PlainChunk chunk = whole_chunk.__new__(whole_chunk)
        chunk.raw = batch
        chunk.size = size
        self._chunks.append(chunk)
        self.end += count
        self.count += count
        self.size += size
        return ()

    @cython.nonecheck(True)
    def _release(self, PlainHand hand):
        """Hold what a cursor had in hand no more."""
        self.release(hand)

    @cython.nonecheck(True)
    cdef int release(self, PlainHand hand) except -1:
        del self._hands[hand]
        self.in_hand -= hand.size
        hand.size = 0
        if hand.pieces:
            self.processed(0, hand.pieces)
            hand.pieces.clear()
        return 0


@cython.auto_pickle(False)
cdef class PlainCursor:
    """The base of `Cursor` in the compiled build."""

    cdef public PlainCache _cache
    cdef public PlainHand hand
    cdef public bint _is_closed
    cdef public int64_t position

    @property
    @cython.nonecheck(True)
    def available(self):
        """How many messages there are to read."""
        return 0 if self._is_closed else self._cache.end - self.position

    def read(self, limit):
        """Read the next items, at most `limit`; empty where there is none. What was read before is processed."""
        return self.batch(limit)

    @cython.nonecheck(True)
    cdef object batch(self, limit):
        if self._is_closed:
            return ()
        cdef PlainCache cache = self._cache
        cdef PlainHand hand = self.hand
        cdef PlainChunk head
        cdef int64_t count, size, most
        cdef int overflow = 0
        most = PyLong_AsLongLongAndOverflow(limit, &overflow)
        if overflow:
            most = INT64_MAX if overflow > 0 else 0
        if hand in cache._hands:
            cache.release(hand)
        count = cache.end - self.position
        if count > most:
            count = most
        if count <= 0:
            return ()
        if len(cache._cursors) != 1 or cache._ahead or cache._found or cache._hands or not cache._chunks:
            return cache._read(self, limit)
        head = cache._chunks[0]
        if len(head.raw) != count or head.items is not None:
            return cache._read(self, limit)
        cache._chunks.popleft()
        size = head.size
        hand.first = self.position
        hand.until = self.position = cache._start = hand.first + count
        cache._hands[hand] = None
        cache.count -= count
        cache.size -= size
        cache.in_hand += size
        hand.size += size
        return cache._wrap(head.raw)

    def settle(self):
        """Record that what was read is processed, if there is nothing to read. Return whether that is so."""
        return self.is_settled()

    @cython.nonecheck(True)
    cdef bint is_settled(self) except -1:
        cdef PlainCache cache = self._cache
        if self.position < cache.end and not self._is_closed:
            return False
        if self.hand in cache._hands:
            cache.release(self.hand)
        return True


cdef int64_t UNCHANGED = -INT64_MAX  # of `PlainCredit.granted`: the credit stays as it is


@cython.auto_pickle(False)
cdef class PlainCredit:
    """The base of `CreditWindow` in the compiled build."""

    cdef public int64_t _counted, _largest, _largest_before, _max_bytes, _max_events, _max_message_size, _most_ramp
    cdef public int64_t _ramp, _total, allowance, credit
    cdef public double _estimate, _mean
    cdef public bint _strict
    cdef public object left

    def received(self, list batch not None):
        """Count a received batch, and return its size in bytes."""
        return self.count_batch(batch)

    @cython.boundscheck(True)
    cdef int64_t count_batch(self, list batch) except -1:
        cdef int64_t count = len(batch), size = 0, largest = 0, each, left
        cdef Py_ssize_t place
        if not count:
            return 0
        for place in range(count):
            each = len(batch[place])
            size += each
            if each > largest:
                largest = each
        self.credit = self.credit - count if self.credit > count else 0
        self.allowance = self.allowance - count if self.allowance > count else 0
        if self.left is not None:
            left = self.left
            self.left = left - count if left > count else 0
        self._ramp = min(self._ramp + count, self._most_ramp)
        self._total = min(self._total + count, sizes_kept)
        self._mean += (<double>size / count - self._mean) * (<double>count / self._total if count < self._total else 1.0)
        if largest > self._largest:
            self._largest = largest
        self._counted += count
        if self._counted >= sizes_kept:
            self._largest_before, self._largest, self._counted = self._largest, 0, 0
        largest = max(self._largest, self._largest_before)
        self._estimate = self._mean if self._mean > largest else <double>largest
        return size

    def grant(self, int64_t events_held, int64_t bytes_held, room=None, *, bint is_alone=True, bint recalls=False):
        """Return the credit to set on the link, or None to leave it unchanged.

        Args:
            events_held: How many messages the cache holds.
            bytes_held: Their size, in bytes.
            room: Bytes that the cache may hold now, if that may be less than `max_bytes`; None if it is not limited.
            is_alone: Whether an empty cache is granted one message even if `room` has none for it.
            recalls: Whether credit for which there is no room is taken back.
        """
        cdef int64_t granted = self.granted(events_held, bytes_held, room, is_alone, recalls)
        return None if granted == UNCHANGED else granted

    cdef int64_t granted(self, int64_t events_held, int64_t bytes_held, room, bint is_alone, bint recalls) except? -1:
        cdef int64_t most = self._max_bytes, limit, wanted, window = self._max_events, fitting
        cdef double each
        if room is not None:
            limit = room
            most = min(most, limit)
        if bytes_held >= most:
            if not self.credit:
                return UNCHANGED
            if not self._strict and bytes_held >= self._max_bytes:
                self._ramp = first_ramp
            self.credit = 0
            return 0
        each = <double>self._max_message_size if self._strict else self._estimate
        if room is not None and not each:
            each = <double>unknown_size
        wanted = window - events_held
        if each:
            fitting = self.quotient(most - bytes_held, each)
            wanted = min(wanted, fitting)
            window = min(window, self.quotient(most, each))
        if not self._strict:
            wanted = min(wanted, self._ramp)
            window = min(window, self._ramp)
        if wanted < 1 and not events_held and is_alone:
            wanted = 1
        if self.left is not None:
            limit = self.left
            wanted = min(wanted, limit)
            window = min(window, limit)
        if wanted - self.credit < (window // 2 or 1) and not (recalls and wanted < self.credit):
            return UNCHANGED
        self.credit = wanted
        if wanted > self.allowance:
            self.allowance = wanted
        return wanted

    cdef int64_t quotient(self, int64_t size, double each) noexcept:
        # No more than the window: an estimate may be so small that the quotient is no number of this size.
        cdef double found = size / each
        return self._max_events if found >= self._max_events else <int64_t>found


@cython.auto_pickle(False)
cdef class PlainBudget:
    """The base of `BufferBudget` in the compiled build."""

    cdef public int64_t _expected, _granted, _link_bytes, beyond, brake_at, held, max_bytes, received
    cdef public bint _is_scarce_anew, _is_short, is_ample, is_braked
    cdef public dict _accounts, _waiting
    cdef public object _turns


@cython.auto_pickle(False)
cdef class PlainAccount:
    """The base of `Account` in the compiled build."""

    cdef public PlainBudget _budget
    cdef public object adjust
    cdef public int64_t _room, beyond, expected, held, received_at
    cdef public bint is_closed, is_idle

    @cython.nonecheck(True)
    def received(self, int64_t size):
        """Record that bytes arrived; return whether all may be added to the cache."""
        return self.count_arrived(size)

    @cython.nonecheck(True)
    cdef bint count_arrived(self, int64_t size) except -1:
        cdef PlainBudget budget = self._budget
        budget.received += size
        self.received_at = budget.received
        self.is_idle = False
        return budget.held - budget.beyond + size <= budget.max_bytes

    @cython.nonecheck(True)
    def holds(self, int64_t size):
        """Record how many bytes the link holds; return whether `BufferBudget.settle` is to be called."""
        return self.count_held(size)

    @cython.nonecheck(True)
    cdef bint count_held(self, int64_t size) except -1:
        cdef PlainBudget budget = self._budget
        budget.held += size - self.held
        self.held = size
        if self.beyond > size:
            budget.beyond += size - self.beyond
            self.beyond = size
        return not budget.is_ample or budget.held >= budget.brake_at


# ------------------------------------------------------------------------------------------ aio/wakeup.py: `Wakeup`

cdef object current_task = None, cancelled_error = None, invalid_state = None, raise_in_loop = None
cdef object enter_task = None, leave_task = None


def wake_tasks(task_of not None, enter not None, leave not None, type cancelled not None, type invalid not None,
               raising not None):
    """Set what `Wakeup` takes from asyncio and `aio/wakeup.py`.

    Args:
        task_of: `asyncio.current_task`.
        enter: `asyncio._enter_task`, which asyncio documents for those that run tasks by themselves.
        leave: `asyncio._leave_task`.
        cancelled: `asyncio.CancelledError`.
        invalid: `asyncio.InvalidStateError`.
        raising: Raises what it is called with.
    """
    global current_task, cancelled_error, invalid_state, raise_in_loop, enter_task, leave_task
    current_task, enter_task, leave_task = task_of, enter, leave
    cancelled_error, invalid_state, raise_in_loop = cancelled, invalid, raising


cdef enum:
    PENDING = 0
    CANCELLED = 1
    FINISHED = 2
    FAILED = 3


@cython.auto_pickle(False)
cdef class Wakeup:
    """A future whose task goes on within the call that completes it. See the class of this name in Python.

    Without a list of free objects: one of it counts as finalized already, and `__del__` would not be called again.
    """

    __class_getitem__ = classmethod(type(list[int]))

    cdef object _loop, _outcome, _resume, _context, _later, _traceback, __weakref__
    cdef int _state
    cdef bint _is_unseen
    cdef public object _asyncio_future_blocking, _cancel_message  # as asyncio names them

    def __init__(self, *, loop):
        self._loop = loop
        self._asyncio_future_blocking = False

    def __repr__(self):
        state = ("pending", "cancelled", "finished", "failed")[self._state]
        return f"<{type(self).__name__} {state}>"

    def __del__(self):
        # As asyncio reports it of its futures: nobody has seen this error.
        if self._is_unseen:
            self._loop.call_exception_handler(
                {
                    "message": f"{type(self).__name__} exception was never retrieved",
                    "exception": self._outcome,
                    "future": self,
                }
            )

    def get_loop(self):
        """Return the event loop."""
        return self._loop

    def done(self):
        """Return whether it is completed or cancelled."""
        return self._state != PENDING

    def cancelled(self):
        """Return whether it is cancelled."""
        return self._state == CANCELLED

    def _make_cancelled_error(self):
        """Return what `result` raises of a cancelled one. `asyncio.gather` calls it."""
        return self.made_cancelled()

    cdef object made_cancelled(self):
        return cancelled_error() if self._cancel_message is None else cancelled_error(self._cancel_message)

    def result(self):
        """Return the result, or raise what it was completed with."""
        if self._state == FINISHED:
            return self._outcome
        if self._state == PENDING:
            raise invalid_state("Result is not ready.")
        if self._state == CANCELLED:
            raise self.made_cancelled()
        self._is_unseen = False
        raise self._outcome.with_traceback(self._traceback)

    def exception(self):
        """Return the error that it was completed with; None where it has a result."""
        if self._state == PENDING:
            raise invalid_state("Exception is not set.")
        if self._state == CANCELLED:
            raise self.made_cancelled()
        self._is_unseen = False
        return self._outcome if self._state == FAILED else None

    def add_done_callback(self, fn, *, context=None):
        """Call a function when it is done: the first within `complete`."""
        if context is None:
            context = PyContext_CopyCurrent()
        if self._state != PENDING:
            self._loop.call_soon(fn, self, context=context)
        elif self._resume is None and self._later is None:
            self._resume, self._context = fn, context
        elif self._later is None:
            self._later = [(fn, context)]
        else:
            self._later.append((fn, context))

    def remove_done_callback(self, fn):
        """Call a function no more; return how many calls that were."""
        cdef int removed = 0
        if self._resume is not None and self._resume == fn:
            self._resume = self._context = None
            removed = 1
        if self._later is not None:
            kept = [each for each in self._later if each[0] != fn]
            removed += len(self._later) - len(kept)
            self._later = kept
        return removed

    def set_result(self, result):
        """Complete it; the task that waits is run in the next turn."""
        self.end_with(FINISHED, result)

    def set_exception(self, exception):
        """Complete it with an error; the task that waits is run in the next turn."""
        if isinstance(exception, type):
            exception = exception()
        if not isinstance(exception, BaseException):
            raise TypeError("invalid exception object")
        if type(exception) is StopIteration:
            raise TypeError("StopIteration interacts badly with generators and cannot be raised into a Future")
        self.end_with(FAILED, exception)
        self._traceback = exception.__traceback__
        self._is_unseen = True

    def cancel(self, msg=None):
        """Cancel it, if it is not done; return whether it was not."""
        if self._state != PENDING:
            return False
        self._cancel_message = msg
        self.end_with(CANCELLED, None)
        return True

    cdef int end_with(self, int state, outcome) except -1:
        if self._state != PENDING:
            raise invalid_state("invalid state")
        self._state, self._outcome = state, outcome
        resume, context = self._resume, self._context
        self._resume = self._context = None
        if resume is not None:
            self._loop.call_soon(resume, self, context=context)
        self.call_others()
        return 0

    cdef int call_others(self) except -1:
        later, self._later = self._later, None
        if later is not None:
            for fn, context in later:
                self._loop.call_soon(fn, self, context=context)
        return 0

    def complete(self, result):
        """Set the result, and run the task that waits until it waits again. Does nothing where it is done.

        Within another task this one is run in the next turn, as by `set_result`.
        """
        if self._state != PENDING:
            return
        self._state, self._outcome = FINISHED, result
        resume, context = self._resume, self._context
        self._resume = self._context = None
        self.call_others()
        if resume is None:
            return
        if current_task(self._loop) is not None:
            self._loop.call_soon(resume, self, context=context)
            return
        try:
            PyContext_Enter(context)
        except RuntimeError:
            # The callback runs in this very context, which the task's maker has given to both, and none is entered
            # twice.
            self._loop.call_soon(resume, self, context=context)
            return
        try:
            resume(self)
        except BaseException as error:
            # A task raises these only, which end the loop: not the work of the caller, before that is done.
            self._loop.call_soon(raise_in_loop, error)
        finally:
            PyContext_Exit(context)

    cdef bint goes_on(self, task, work) except -1:
        """Run some work as the task that waits would, and in its context; return whether the task is to wait on."""
        if self._state != PENDING or self._resume is None:
            return False
        context = self._context
        try:
            enter_task(self._loop, task)
        except RuntimeError:
            return False  # another task runs: this one in the next turn
        try:
            try:
                PyContext_Enter(context)
            except RuntimeError:
                return False  # as in `complete`
            try:
                return work()
            finally:
                PyContext_Exit(context)
        finally:
            leave_task(self._loop, task)

    def end(self, error):
        """Complete it with None, or with an error, which is for the next turn. Does nothing where it is done."""
        if error is None:
            self.complete(None)
        elif self._state == PENDING:
            self.set_exception(error)

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        if self._state == PENDING:
            if self._asyncio_future_blocking:
                raise RuntimeError("await wasn't used with future")
            self._asyncio_future_blocking = True
            return self
        if self._state == FINISHED:
            raise StopIteration(self._outcome)
        self.result()


# -------------------------------------------------------------------- consumer/link/feed.py: a feed and its readers

cdef object short_message = None
cdef Py_ssize_t large_message = 0


def feed_events(Py_ssize_t large, shorten not None):
    """Set what a feed takes from `consumer/link/feed.py`.

    Args:
        large: The size from which on a message is not kept for its place alone, in bytes.
        shorten: Returns such a message without its body.
    """
    global short_message, large_message
    short_message, large_message = shorten, large


def received_events(origin, list messages not None):
    """Return the events of received messages, all of one origin."""
    cdef Py_ssize_t place, count = len(messages)
    cdef list made = []
    cdef EncodedEvent event
    if whole_event is None:
        raise TypeError("the class of events is not set")
    for place in range(count):
        event = (<type>whole_event).__new__(<type>whole_event)
        event._raw = messages[place]
        event._origin = origin
        made.append(event)
    return made


@cython.auto_pickle(False)
cdef class PlainFacts:
    """The base of `LinkFacts` in the compiled build."""

    cdef public object first, hub_answer, newest
    cdef public int64_t batches, links
    cdef public double quiet_since, received_at


@cython.auto_pickle(False)
cdef class PlainFeed:
    """The base of `PartitionFeed` in the compiled build."""

    __class_getitem__ = classmethod(type(list[int]))

    cdef public object _kept, _streams, now
    cdef public PlainFacts facts
    cdef public tuple _cursors, _plain
    cdef public PlainCache _cache
    cdef public PlainCredit _credit
    cdef public PlainAccount account
    cdef public PlainBudget _budget
    cdef public bint _is_refusing, is_filling, is_stopped

    @cython.boundscheck(True)
    @cython.nonecheck(True)
    def messages(self, list batch not None):
        """Add a batch to the cache: one append and at most one wake-up, however many messages it has."""
        cdef PlainCache cache = self._cache
        cdef int64_t size
        cdef bint is_read_alone
        cdef PlainFacts facts = self.facts
        if self._is_refusing or not batch:
            return
        cdef PlainCredit window = self._credit
        cdef PlainAccount account = self.account
        size = window.count_batch(batch)
        if account is not None and not account.count_arrived(size):
            batch = self._kept_of(account, batch)
            if not batch:
                return
            size = sum(map(len, batch))
        woken = cache.add(batch, size)
        newest = batch[len(batch) - 1]
        facts.newest = newest if len(newest) <= large_message else short_message(newest)
        if facts.first is None:
            facts.first = short_message(batch[0]) if len(batch[0]) > large_message else batch[0]
        facts.batches += 1
        facts.received_at = facts.quiet_since = self.now()
        facts.hub_answer = None
        is_read_alone = len(self._cursors) == 1 and not self._streams
        if not is_read_alone:
            self.adjust()
        for cursor in self._plain:
            (<PlainFeedCursor?>cursor).wake_up()
        for stream in woken:
            # One that the function of another has closed is not among them any more.
            reader = self._streams.get(stream)
            if reader is not None:
                reader.arrived()
        if is_read_alone and cache.count:
            # It has adjusted the credit if it has taken all.
            self.adjust()

    def adjust_credit(self):
        """Let the service send what there is room for. Called when messages were received, taken or given up."""
        self.adjust()

    @cython.nonecheck(True)
    cdef int adjust(self) except -1:
        cdef bint is_due = False
        cdef int64_t credit
        if self.account is not None:
            is_due = self.account.count_held(self._cache.size + self._cache.in_hand)
        if len(self._cursors) > 1 or not (self.account is None or self._budget is None or self._budget.is_ample):
            self._grant()
        else:
            self.is_filling = False
            link = self._kept.link
            if link is not None and not self.is_stopped:
                credit = self._credit.granted(self._cache.count, self._cache.size, None, True, False)
                if credit != UNCHANGED:
                    link.set_credit(credit)
        if is_due:
            self._settle()
        return 0

    def processed(self):
        """Adjust the credit after something that is not in the cache any more was processed."""
        self.count_processed()

    @cython.nonecheck(True)
    cdef int count_processed(self) except -1:
        if self.account is not None and self.account.count_held(self._cache.size + self._cache.in_hand):
            self._grant()
            self._settle()
        return 0


@cython.auto_pickle(False)
cdef class PlainFeedCursor:
    """The base of `FeedCursor` in the compiled build."""

    __class_getitem__ = classmethod(type(list[int]))

    cdef public object _cursor, _timer, _work, _task
    cdef public PlainFeed _feed
    cdef public Wakeup _waiter
    cdef public PlainCache _cache
    cdef public double _timer_at, _wait_until
    cdef double _timeout

    def take(self, limit):
        """Take what is there, at most `limit` messages; empty where nothing is."""
        return self.taken(limit)

    @cython.nonecheck(True)
    cdef object taken(self, limit):
        cdef PlainCache cache = self._cache
        cdef PlainFeed feed = self._feed
        cdef int64_t held = cache.count, in_hand = cache.in_hand
        # A local each, here and below: what is called may replace the attribute, and the object has to outlive the call.
        cursor = self._cursor
        messages = (<PlainCursor>cursor).batch(limit) if isinstance(cursor, PlainCursor) else cursor.read(limit)
        if cache.count < held:
            # Of several cursors only the last one to read makes room in the cache.
            feed.adjust()
        elif cache.in_hand != in_hand:
            feed.count_processed()
        return messages

    def settle(self):
        """Record that what was taken is processed, if there is nothing to take. Return whether that is so."""
        return self.is_settled()

    @cython.nonecheck(True)
    cdef bint is_settled(self) except -1:
        cdef PlainCache cache = self._cache
        cdef PlainFeed feed = self._feed
        cdef int64_t in_hand = cache.in_hand
        cursor = self._cursor
        if not ((<PlainCursor>cursor).is_settled() if isinstance(cursor, PlainCursor) else cursor.settle()):
            return False
        if cache.in_hand != in_hand:
            feed.count_processed()
        return True

    def wait(self, timeout, work=None, task=None):
        """Wait until there is something to take, the feed has ended, or `wake` is called. Await it at once;
        False at the time-out.

        Args:
            timeout: In seconds; None for none.
            work: Called when something can be taken, as the task that waits and in its context, which may take it: it
                returns whether the task is to wait on, for as long again.
            task: The task that waits, where there is `work`.
        """
        cdef Wakeup waiter = Wakeup.__new__(Wakeup)
        feed = self._feed
        waiter._loop = feed.loop
        waiter._asyncio_future_blocking = False
        if self._cursor.available or feed.error is not None:
            waiter._state, waiter._outcome = FINISHED, True
            return waiter
        self._waiter, self._work, self._task = waiter, work, task
        if timeout is None:
            self._timeout = self._wait_until = INFINITY
            return waiter
        # The timer of an earlier wait is left to run out, and set again then: most waits end long before it.
        self._timeout = timeout
        self._wait_until = feed.now() + self._timeout
        if self._timer is None or self._timer_at > self._wait_until:
            self._set_timer()
        return waiter

    def arrived(self):
        """End a wait, as there is something to take: the task that waits takes it within this call, if it may."""
        self.wake_up()

    @cython.nonecheck(True)
    cdef int wake_up(self) except -1:
        waiter = self._waiter
        if waiter is None:
            return 0
        if self._work is not None and waiter.goes_on(self._task, self._work):
            if self._timeout != INFINITY:
                self._wait_until = self._feed.now() + self._timeout
                if self._timer is None:
                    self._set_timer()
            return 0
        if self._waiter is waiter:
            self._waiter = None
        self._work = self._task = None
        waiter.complete(True)
        return 0


@cython.auto_pickle(False)
cdef class PlainMember:
    """The base of `MemberFeed` in the compiled build."""

    cdef public object _cursor, _feed, _shared, _skip_below, _taken, _unprocessed, selection
    cdef public bint has_own_link

    def take(self, limit):
        """Take what is there, at most `limit` events; empty where nothing is. What was taken before is processed."""
        cursor = self._cursor
        if (
            self._unprocessed is not None or self.selection is not None or self._skip_below is not None
            or self.has_own_link or not isinstance(cursor, PlainFeedCursor)
        ):
            return self._take(limit)
        events = (<PlainFeedCursor>cursor).taken(limit)
        if not events:
            return events
        last = events[len(events) - 1]
        if isinstance(last, EncodedEvent) and ((<EncodedEvent>last)._offset is not None or (<EncodedEvent>last).read()):
            self._taken = last
        else:
            self._note_taken(events)
        shared = self._shared
        if shared.is_shared and (shared.is_watching or (self._feed is not None and self._feed.is_filling)):
            shared.observe()
            if self.has_own_link:  # since then
                shared.rejoin(self)
        return events

    def processed(self):
        """Record that what was taken is processed, as the next `take` does, if there is nothing to take."""
        cursor = self._cursor
        return (
            isinstance(cursor, PlainFeedCursor) and self.selection is None and not self.has_own_link
            and (<PlainFeedCursor>cursor).is_settled()
        )
