# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""The compiled core: what is done once per event. Each part does what Python code of the same name does.

That code is the reference. What is unusual is left to it: then a function here takes no more, or a class calls a method
that its Python subclass has. `tests/unit/test_core.py` compares the two on damaged bytes.

Every size and index that comes from bytes is compared with what is there before anything is read. Integers of a size on
the wire have 32 bits and are kept in 64, so that no sum of them overflows.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.datetime cimport datetime_new, get_utc, import_datetime
from cpython.dict cimport PyDict_CheckExact
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport INT32_MAX, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

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


def complete(str name not None, reference not None, whole not None):
    """Set what belongs to a class of this module.

    Args:
        name: The class.
        reference: The whole class in Python.
        whole: What is made of both.
    """
    global whole_event
    references[name] = reference
    if name == "EncodedEvent":
        whole_event = whole


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
    cdef Py_ssize_t size
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
    return pos + size if size <= end - pos else -1


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
    cdef Py_ssize_t pos = 0, start, size
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
            found.body_size = size
            bodies += 1
        elif code == 0x72:
            if has_annotations or constructor & 0xEF != 0xC1:
                return False
            has_annotations = True
            if not find_annotations(raw, start + (4 if constructor & 0x10 else 1), start + size, found):
                return False
        elif code > 0x75:
            bodies += 2
        pos = start + size
    if bodies != 1:
        found.body_at = -1
    return found.has_sequence and found.has_time and found.offset_at >= 0


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

    cdef public object _raw, _origin, _offset, _body, _message, _key
    cdef public int64_t _sequence_number, _enqueued
    cdef int body_at, body_size, key_at, key_size

    def __cinit__(self):
        self.body_at = -1
        self.key_at = UNKNOWN_KEY

    def __init__(self, raw, origin=None):
        self._raw = raw
        self._origin = origin
        self._offset = self._body = self._message = None
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
        if self._message is None:
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


# ------------------------------------------------------- eventhubs/events.py: an event to send that is bytes and no more


@cython.auto_pickle(False)
cdef class PlainEventData:
    """The base of `EventData` in the compiled build."""

    cdef public object _body, _payload, _properties, published_sequence_number, standard

    def __init__(self, *given, **named):
        if len(given) == 1 and not named and PyBytes_CheckExact(given[0]):
            self._payload = given[0]
            self._body = self._properties = self.standard = self.published_sequence_number = None
        else:
            references["PlainEventData"].__init__(self, *given, **named)

    cdef bint is_plain(self):
        """Return whether the event is bytes and no more."""
        return (
            self.standard is None
            and (self._properties is None or (PyDict_CheckExact(self._properties) and not self._properties))
            and PyBytes_CheckExact(self._payload)
        )


# ----------------------------------- eventhubs/sealing.py, producer/packing.py, producer/batch.py: events into a message

cdef object python_pieces_of = None
cdef object data_heads = None, numbered_heads = None
cdef bytes first_key = b""
cdef Py_ssize_t id_place = 0
cdef int64_t number_count = 1
cdef object python_number_events = None
cdef object event_data = None, open_state = None


def seal_events(
    event_class, to_pieces, to_message, heads, heads_with_room, bytes key not None, Py_ssize_t id_at, int64_t numbers
):
    """Set what the functions below share with `eventpump.eventhubs.sealing`.

    Args:
        event_class: `EventData`.
        to_pieces: The reference of `pieces_of`.
        to_message: The reference of `number_events`.
        heads: What stands before the payload of an event, by its size; and with room for numbers.
        key: The name of the first annotation in that room.
        id_at: Where the producer id stands, counted from there.
        numbers: How many numbers there are.
    """
    global event_data, python_pieces_of, python_number_events
    global data_heads, numbered_heads, first_key, id_place, number_count
    if not issubclass(event_class, PlainEventData) or id_at < 0:
        raise TypeError("the class of events must be based on that of the core, and the place lie behind the name")
    event_data, python_pieces_of, python_number_events = event_class, to_pieces, to_message
    data_heads, numbered_heads = heads, heads_with_room
    first_key, id_place, number_count = key, id_at, numbers


def fill_batches(is_open):
    """Set the state of a batch that takes events."""
    global open_state
    open_state = is_open


def pieces_of(event, *, idempotent=False, stamped=False):
    """See `eventpump.eventhubs.sealing.pieces_of`."""
    if not stamped and type(event) is event_data and (<PlainEventData>event).is_plain():
        payload = (<PlainEventData>event)._payload
        return (numbered_heads if idempotent else data_heads)[PyBytes_GET_SIZE(payload)], payload
    return python_pieces_of(event, idempotent=idempotent, stamped=stamped)


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

    cdef public object events, is_idempotent, is_stamped, partition_key, state, _encode, _packer, _sealed

    def try_add(self, event):
        """Add an event.

        Returns:
            False, and nothing added, where it does not fit any more.

        Raises:
            EventTooLargeError: It would not fit an empty batch either.
            EventError: It is no `EventData`, cannot be encoded, or carries a number already; or the batch is on its way
                or published.
        """
        cdef bytes head, payload
        cdef bint is_numbered
        if (
            type(event) is event_data
            and (<PlainEventData>event).is_plain()
            and self.state is open_state
            and self.partition_key is None
            and self._encode is None  # a function that makes the event to send of a user's
            and not self.is_stamped
            and isinstance(self._packer, PlainPacker)
        ):
            is_numbered = self.is_idempotent
            payload = (<PlainEventData>event)._payload
            head = (numbered_heads if is_numbered else data_heads)[PyBytes_GET_SIZE(payload)]
            if not (is_numbered and (<PlainEventData>event).published_sequence_number is not None) and (
                (<PlainPacker>self._packer).append(head, payload)
            ):
                if is_numbered:
                    self.events.append(event)
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
