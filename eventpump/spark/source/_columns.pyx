# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The columns of the Spark source, filled straight into Arrow's buffers: the compiled form of `columnar.py`.

That code, with `rows.py`, is the reference, and reads every message that is *odd* here: what is odd there, and a body
that is not one data section, or a column's value of another type than usual. `tests/unit/spark/test_columns.py`
compares the two on damaged bytes.

Every size and index that comes from bytes is compared with what is there before anything is read. Integers of a size on
the wire have 32 bits and are kept in 64, so that no sum of them overflows.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint64_t, uint32_t
from libc.stdio cimport snprintf
from libc.string cimport memcmp, memcpy, memset

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

cdef extern from *:
    """
    #ifndef EVENTPUMP_SOURCE
    #define EVENTPUMP_SOURCE 0U
    #endif
    """
    const uint32_t EVENTPUMP_SOURCE

SOURCE = EVENTPUMP_SOURCE
"""The CRC-32 of the source that this was built from."""

NAMES = (
    "body", "offset", "sequenceNumber", "enqueuedTime", "publisher", "partitionKey", "properties", "systemProperties"
)
"""The columns that `fill` makes."""

cdef enum:
    # In the order of `NAMES`.
    BODY = 1
    OFFSET = 2
    NUMBER = 4
    TIME = 8
    PUBLISHER = 16
    KEY = 32
    OWN = 64
    SYSTEM = 128
    MAX_ENTRIES = 32  # of a map; likewise in `columnar.py`
    MAX_NAMES = 64  # of entries in one buffer; a bit each
    STANDARD = 13  # fields of the properties section
    FIRST_STANDARD = 5  # the index of the first of their names; before it those of the annotations below

cdef int64_t FIRST_MOMENT = -62_135_596_800_000, LAST_MOMENT = 253_402_300_799_999

# By constructor: the width of the size field, 0, 1 or 4, or -1 where it is not supported; and of a value without one.
cdef signed char size_bytes[256]
cdef unsigned char fixed_width[256]
memset(size_bytes, -1, 256)
memset(fixed_width, 0, 256)
for _codes, _told, _width in (
    ((0x40, 0x41, 0x42, 0x43, 0x44, 0x45), 0, 0),
    ((0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56), 0, 1),
    ((0x60, 0x61), 0, 2),
    ((0x70, 0x71, 0x72, 0x73, 0x74), 0, 4),
    ((0x80, 0x81, 0x82, 0x83, 0x84), 0, 8),
    ((0x94, 0x98), 0, 16),
    ((0xA0, 0xA1, 0xA3, 0xC0, 0xC1, 0xE0), 1, 0),
    ((0xB0, 0xB1, 0xB3, 0xD0, 0xD1, 0xF0), 4, 0),
):
    for _code in _codes:
        size_bytes[<unsigned char>_code] = _told
        fixed_width[<unsigned char>_code] = _width


cdef inline int64_t size_at(const unsigned char *at) noexcept nogil:
    """Read four bytes as a number, the first being the highest. It is not negative where a Py_ssize_t has 32 bits."""
    return (<int64_t>at[0] << 24) | (<int64_t>at[1] << 16) | (<int64_t>at[2] << 8) | <int64_t>at[3]


cdef inline int64_t long_at(const unsigned char *at) noexcept nogil:
    """Read eight bytes as a signed number."""
    return <int64_t>((<uint64_t>size_at(at) << 32) | <uint64_t>size_at(at + 4))


cdef struct Value:
    int name  # the index of the entry's name
    int kind  # the constructor
    const unsigned char *at
    const unsigned char *begin
    const unsigned char *end


cdef bint value_at(const unsigned char *at, const unsigned char *end, Value *to) noexcept nogil:
    """Find where a value begins and ends. False where it does not end before `end`, or is not supported."""
    cdef int64_t size
    cdef int told
    if at >= end:
        return False
    told = size_bytes[at[0]]
    if told < 0 or end - at - 1 < told:
        return False
    size = fixed_width[at[0]] if told == 0 else at[1] if told == 1 else size_at(at + 1)
    to.kind = at[0]
    to.at = at
    to.begin = at + 1 + told
    if size > end - to.begin:
        return False
    to.end = to.begin + <Py_ssize_t>size
    return True


cdef inline bint is_text(int kind) noexcept nogil:
    return kind == 0xA1 or kind == 0xA3 or kind == 0xB1 or kind == 0xB3


cdef bint is_utf8(const unsigned char *at, Py_ssize_t size) except -1:
    """Return whether bytes are UTF-8, and quickly where they are ASCII."""
    cdef uint64_t eight, high = 0
    cdef Py_ssize_t place = 0
    while size - place >= 8:
        memcpy(&eight, at + place, 8)
        high |= eight
        place += 8
    while place < size:
        high |= at[place]
        place += 1
    if not high & <uint64_t>0x8080808080808080:
        return True
    try:
        PyUnicode_DecodeUTF8(<const char *>at, size, NULL)
    except UnicodeDecodeError:
        return False
    return True


cdef int whole_number(Value *value, char *to) noexcept nogil:
    """Write the text of a whole number of up to 64 bits, and return its size; 0 where it is no such value."""
    cdef const unsigned char *at = value.begin
    cdef int kind = value.kind
    cdef int64_t number
    if kind == 0x80:
        return snprintf(to, 32, b"%llu", <unsigned long long>long_at(at))
    if kind == 0x43 or kind == 0x44:
        number = 0
    elif kind == 0x50 or kind == 0x52 or kind == 0x53:
        number = at[0]
    elif kind == 0x51 or kind == 0x54 or kind == 0x55:
        number = <signed char>at[0]
    elif kind == 0x60:
        number = (<int64_t>at[0] << 8) | at[1]
    elif kind == 0x61:
        number = (<int64_t><signed char>at[0] * 256) | at[1]
    elif kind == 0x70:
        number = size_at(at)
    elif kind == 0x71:
        number = <int32_t>size_at(at)
    elif kind == 0x81:
        number = long_at(at)
    else:
        return 0
    return snprintf(to, 32, b"%lld", <long long>number)


@cython.auto_pickle(False)
@cython.final
cdef class Block:
    """Memory that grows, and that Arrow reads as it is."""

    cdef char *data
    cdef Py_ssize_t size, room, readers

    def __dealloc__(self):
        PyMem_Free(self.data)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data if self.data != NULL else <char *>&self.room, self.size, 1, flags)
        self.readers += 1

    cdef int add(self, const void *at, Py_ssize_t size) except -1:
        cdef Py_ssize_t room
        cdef void *moved
        if size > self.room - self.size:
            if self.readers or size > PY_SSIZE_T_MAX // 4 - self.room:
                raise OverflowError("the memory is in use, or too large")
            room = 2 * self.room + size + 1024
            moved = PyMem_Realloc(self.data, room)
            if moved == NULL:
                raise MemoryError
            self.data = <char *>moved
            self.room = room
        if size:
            memcpy(self.data + self.size, at, size)
        self.size += size
        return 0


@cython.auto_pickle(False)
@cython.final
cdef class Texts:
    """A column of binary or text: its bytes, where each item begins, and which are null."""

    cdef Block data, begins, nulls
    cdef int32_t count, null_count

    def __cinit__(self):
        cdef int32_t zero = 0
        self.data, self.begins, self.nulls = Block(), Block(), Block()
        self.begins.add(&zero, sizeof(int32_t))

    cdef int add(self, const void *at, Py_ssize_t size, bint is_null=False) except -1:
        cdef int32_t end
        cdef char null = is_null
        if size > INT32_MAX - self.data.size or self.count == INT32_MAX:
            raise OverflowError("a column of more than 2 GiB")
        self.data.add(at, size)
        end = <int32_t>self.data.size
        self.begins.add(&end, sizeof(int32_t))
        self.nulls.add(&null, 1)
        self.null_count += is_null
        self.count += 1
        return 0

    cdef int add_value(self, Value *value) except -1:
        return self.add(value.begin, value.end - value.begin)

    cdef tuple buffers(self):
        """Return the number of items and of nulls; and the buffers: which are not null, where each begins, the bytes."""
        cdef Py_ssize_t size = (<Py_ssize_t>self.count + 7) // 8, place
        cdef bytes valid = None
        cdef char *bits
        if self.null_count:
            valid = PyBytes_FromStringAndSize(NULL, size)
            bits = PyBytes_AS_STRING(valid)
            memset(bits, 0, size)
            for place in range(self.count):
                if not self.nulls.data[place]:
                    bits[place >> 3] |= <char>(1 << (place & 7))
        return self.count, self.null_count, valid, self.begins, self.data


@cython.auto_pickle(False)
@cython.final
cdef class Filler:
    """Fills the columns, message by message."""

    cdef int wanted, name_count
    cdef list names  # keeps the bytes that the next two are of
    cdef const char *name_bytes[MAX_NAMES]
    cdef Py_ssize_t name_sizes[MAX_NAMES]
    cdef object to_text
    cdef dict texts_of  # what was made of values, by their bytes; None for null, False where they have none
    cdef Texts body, offset, publisher, key, names_of_own, own, names_of_system, system
    cdef Block number, time
    # Of the message being read. Two maps, and the standard properties with the second.
    cdef Value annotations[MAX_ENTRIES + STANDARD]
    cdef Value properties[MAX_ENTRIES]
    cdef int annotation_count, property_count
    cdef uint64_t seen

    def __cinit__(self, int wanted, tuple names, object to_text):
        if len(names) != FIRST_STANDARD + STANDARD:
            raise ValueError("the names of the annotations and of the standard properties are needed")
        self.wanted = wanted
        self.to_text = to_text
        self.texts_of = {}
        self.names = []
        for name in names:
            if not PyBytes_CheckExact(name):
                raise TypeError("a name is bytes")
            self.intern(name)
        self.body, self.offset, self.publisher, self.key = Texts(), Texts(), Texts(), Texts()
        self.names_of_own, self.own, self.names_of_system, self.system = Texts(), Texts(), Texts(), Texts()
        self.number, self.time = Block(), Block()

    cdef int intern(self, bytes name) except -1:
        self.names.append(name)
        self.name_bytes[self.name_count] = PyBytes_AS_STRING(name)
        self.name_sizes[self.name_count] = PyBytes_GET_SIZE(name)
        self.name_count += 1
        return self.name_count - 1

    cdef int name_at(self, const unsigned char *at, Py_ssize_t size) except -2:
        """Return the index of a name; -1 where there are too many, or it is not UTF-8."""
        cdef int index
        for index in range(self.name_count):
            if self.name_sizes[index] == size and memcmp(self.name_bytes[index], at, size) == 0:
                return index
        if self.name_count == MAX_NAMES or not is_utf8(at, size):
            return -1
        return self.intern(PyBytes_FromStringAndSize(<const char *>at, size))

    cdef int read_map(self, Value *section, Value *to) except -2:
        """Read the entries of a map whose names are short texts, each there once. Return how many; -1 where it is odd."""
        cdef const unsigned char *at = section.begin
        cdef const unsigned char *end = section.end
        cdef int width = 1 if section.kind == 0xC1 else 4, number, name
        cdef int64_t count
        cdef Py_ssize_t size
        if end - at < width:
            return -1
        count = at[0] if width == 1 else size_at(at)
        at += width
        if count & 1 or count > end - at or count > 2 * MAX_ENTRIES:
            return -1
        count >>= 1
        self.seen = 0
        for number in range(<int>count):
            if end - at < 2 or (at[0] != 0xA1 and at[0] != 0xA3):
                return -1
            size = at[1]
            at += 2
            if size == 0 or size > end - at:
                return -1
            name = self.name_at(at, size)
            if name < 0 or self.seen >> name & 1 or not value_at(at + size, end, to + number):
                return -1
            self.seen |= <uint64_t>1 << name
            to[number].name = name
            at = to[number].end
        return <int>count if at == end else -1

    cdef int read_list(self, Value *section, Value *to) except -2:
        """Likewise the items of the properties section that are not null."""
        cdef const unsigned char *at = section.begin
        cdef const unsigned char *end = section.end
        cdef int width = 1 if section.kind == 0xC0 else 4, number, found = 0
        cdef int64_t count
        if section.kind == 0x45:
            return 0
        if end - at < width:
            return -1
        count = at[0] if width == 1 else size_at(at)
        at += width
        if count > end - at or count > STANDARD:
            return -1
        for number in range(<int>count):
            if not value_at(at, end, to + found):
                return -1
            at = to[found].end
            if to[found].kind != 0x40:
                if self.seen >> (FIRST_STANDARD + number) & 1:
                    return -1
                to[found].name = FIRST_STANDARD + number
                found += 1
        return found if at == end else -1

    cdef bint has_text(self, Value *value) except -1:
        """Return whether a value of a map has a text, or is null. Makes the text where it is neither text nor number."""
        cdef bytes raw
        cdef char[32] number
        if is_text(value.kind):
            return is_utf8(value.begin, value.end - value.begin)
        if value.kind == 0x40 or whole_number(value, number):
            return True
        raw = PyBytes_FromStringAndSize(<const char *>value.at, value.end - value.at)
        if raw not in self.texts_of:
            try:
                text = self.to_text(raw)
                self.texts_of[raw] = None if text is None else text.encode()
            except Exception:  # the reference raises it for its caller
                self.texts_of[raw] = False
        return self.texts_of[raw] is not False

    cdef int add_entry(self, Value *value, Texts names, Texts values) except -1:
        """Add an entry to the columns of a map."""
        cdef char[32] number
        cdef int size
        cdef bytes made
        names.add(self.name_bytes[value.name], self.name_sizes[value.name])
        if is_text(value.kind):
            return values.add_value(value)
        if value.kind == 0x40:
            return values.add(NULL, 0, True)
        size = whole_number(value, number)
        if size:
            return values.add(number, size)
        made = self.texts_of[PyBytes_FromStringAndSize(<const char *>value.at, value.end - value.at)]
        if made is None:
            return values.add(NULL, 0, True)
        return values.add(PyBytes_AS_STRING(made), PyBytes_GET_SIZE(made))

    cdef bint add(self, const unsigned char *at, const unsigned char *end) except -1:
        """Add a message to the columns. False, and nothing is changed, where it is odd."""
        cdef Value found, body, annotations, properties, own
        cdef Value *place[FIRST_STANDARD]  # of the annotations that have columns, by the indexes of their names
        cdef int last = 0x6F, code, form, index, standard = 0
        annotations.kind = properties.kind = own.kind = body.kind = 0
        self.annotation_count = self.property_count = 0
        self.seen = 0
        while at < end:
            if end - at < 4 or at[0] != 0 or at[1] != 0x53:
                return False
            code = at[2]
            if code <= last or code > 0x78 or code == 0x76 or code == 0x77 or not value_at(at + 3, end, &found):
                return False
            form = 0xA0 if code == 0x75 else 0xC0 if code == 0x70 or code == 0x73 else 0xC1
            if found.kind & 0xEF != form and not (form == 0xC0 and found.kind == 0x45):
                return False
            if code == 0x75:
                body = found
            elif code == 0x72:
                annotations = found
            elif code == 0x73:
                properties = found
            elif code == 0x74:
                own = found
            last = code
            at = found.end
        if body.kind == 0:
            return False
        if self.wanted & OWN and own.kind:
            self.property_count = self.read_map(&own, self.properties)
            if self.property_count < 0:
                return False
            for index in range(self.property_count):
                if not self.has_text(&self.properties[index]):
                    return False
            self.seen = 0
        if self.wanted & ~(BODY | OWN) and annotations.kind:
            self.annotation_count = self.read_map(&annotations, self.annotations)
            if self.annotation_count < 0:
                return False
        memset(place, 0, sizeof(place))
        for index in range(self.annotation_count):
            if self.annotations[index].name < FIRST_STANDARD:
                place[self.annotations[index].name] = &self.annotations[index]
        if self.wanted & SYSTEM:
            if properties.kind:
                standard = self.read_list(&properties, self.annotations + self.annotation_count)
                if standard < 0:
                    return False
            for index in range(self.annotation_count + standard):
                if self.annotations[index].name > 2 and not self.has_text(&self.annotations[index]):
                    return False
        # The order is that of the names given to `fill`: number, offset, time, key, publisher.
        if self.wanted & NUMBER and (place[0] == NULL or (place[0].kind != 0x81 and place[0].kind != 0x55)):
            return False
        if self.wanted & OFFSET and (place[1] == NULL or not self.is_sound_text(place[1])):
            return False
        if self.wanted & TIME and (place[2] == NULL or place[2].kind != 0x83):
            return False
        if self.wanted & KEY and not (place[3] == NULL or place[3].kind == 0x40 or self.is_sound_text(place[3])):
            return False
        if self.wanted & PUBLISHER and not (place[4] == NULL or place[4].kind == 0x40 or self.is_sound_text(place[4])):
            return False
        self.keep(&body, place, standard)
        return True

    cdef bint is_sound_text(self, Value *value) except -1:
        return is_text(value.kind) and is_utf8(value.begin, value.end - value.begin)

    cdef int keep(self, Value *body, Value **place, int standard) except -1:
        """Add a message that is not odd."""
        cdef int index
        cdef int64_t number, moment
        if self.wanted & BODY:
            self.body.add_value(body)
        if self.wanted & NUMBER:
            number = long_at(place[0].begin) if place[0].kind == 0x81 else <signed char>place[0].begin[0]
            self.number.add(&number, sizeof(int64_t))
        if self.wanted & OFFSET:
            self.offset.add_value(place[1])
        if self.wanted & TIME:
            moment = long_at(place[2].begin)
            moment = LAST_MOMENT * 1000 + 999 if moment > LAST_MOMENT else max(moment, FIRST_MOMENT) * 1000
            self.time.add(&moment, sizeof(int64_t))
        if self.wanted & KEY:
            self.add_optional(place[3], self.key)
        if self.wanted & PUBLISHER:
            self.add_optional(place[4], self.publisher)
        if self.wanted & OWN:
            for index in range(self.property_count):
                self.add_entry(&self.properties[index], self.names_of_own, self.own)
        if self.wanted & SYSTEM:
            for index in range(self.annotation_count + standard):
                if self.annotations[index].name > 2:
                    self.add_entry(&self.annotations[index], self.names_of_system, self.system)
        return 0

    cdef int add_optional(self, Value *value, Texts texts) except -1:
        if value == NULL or value.kind == 0x40:
            return texts.add(NULL, 0, True)
        return texts.add_value(value)


def fill(bytes data not None, bytes lengths not None, columns, tuple names not None, to_text):
    """Fill columns of messages.

    Args:
        data: The messages, one behind the other; there may be more bytes behind them.
        lengths: The length of each message, in bytes; a signed number of 64 bits in the machine's order.
        columns: The columns to fill, some of `NAMES`.
        names: The annotations with the sequence number, offset, enqueued time, partition key and publisher; then the
            standard properties in order.
        to_text: Makes the text, or None, of an encoded value.

    Returns:
        The numbers of the messages that are odd; and by column what belongs to the others: numbers as a buffer; texts as
        `Texts.buffers`; maps as where each begins, and texts for names and values. Columns not asked for are empty.

    Raises:
        ValueError: The lengths exceed the data.
        OverflowError: A column is larger than Arrow's offsets can express.
    """
    cdef Py_ssize_t count = PyBytes_GET_SIZE(lengths) // sizeof(int64_t), row
    cdef int64_t length
    cdef const unsigned char *at = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef const unsigned char *end = at + PyBytes_GET_SIZE(data)
    cdef const char *sizes = PyBytes_AS_STRING(lengths)
    cdef list odd = []
    cdef Filler filler = Filler(sum(1 << place for place, name in enumerate(NAMES) if name in columns), names, to_text)
    cdef Block own = Block(), system = Block()  # where the maps of each message begin
    own.add(&filler.own.count, sizeof(int32_t))
    system.add(&filler.system.count, sizeof(int32_t))
    for row in range(count):
        memcpy(&length, sizes + row * sizeof(int64_t), sizeof(int64_t))
        if not 0 <= length <= end - at:
            raise ValueError("the lengths are not those of the data")
        if filler.add(at, at + length):
            own.add(&filler.own.count, sizeof(int32_t))
            system.add(&filler.system.count, sizeof(int32_t))
        else:
            odd.append(row)
        at += length
    return odd, {
        "body": filler.body.buffers(),
        "offset": filler.offset.buffers(),
        "sequenceNumber": filler.number,
        "enqueuedTime": filler.time,
        "publisher": filler.publisher.buffers(),
        "partitionKey": filler.key.buffers(),
        "properties": (own, filler.names_of_own.buffers(), filler.own.buffers()),
        "systemProperties": (system, filler.names_of_system.buffers(), filler.system.buffers()),
    }
