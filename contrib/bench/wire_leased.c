/* leased: MessagePack-RPC, [0, msgid, method, [map]] -> [1, msgid, error, result]. */
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *put_byte(char *out, unsigned byte) {
    *out = (char)byte;
    return out + 1;
}

static char *put_big_endian(char *out, uint64_t value, unsigned bytes) {
    for (unsigned i = bytes; i--;)
        out = put_byte(out, (unsigned)(value >> (8 * i)) & 0xff);
    return out;
}

static char *put_text(char *out, const char *text) {
    size_t size = strlen(text);
    if (size < 32)
        out = put_byte(out, 0xa0 | (unsigned)size);
    else
        out = put_big_endian(put_byte(out, 0xd9), size, 1);
    memcpy(out, text, size);
    return out + size;
}

static char *put_pair(char *out, const char *name, const char *value) { return put_text(put_text(out, name), value); }

static char *put_ttl(char *out) { return put_big_endian(put_byte(put_text(out, "ttl_seconds"), 0xcd), options.ttl_seconds, 2); }

static size_t request(struct connection *c, enum step step, char *out) {
    static const char *const methods[STEP_COUNT] = {NULL, "lease", "release", "renew", "lease", "check"};
    char other[MAX_TEXT + 8], id[40], *at = out;
    bool with_id = options.request_id && (step == STEP_ACQUIRE || step == STEP_CONTEND);
    at = put_byte(put_byte(at, 0x94), 0x00);
    at = put_big_endian(put_byte(at, 0xce), c->msgid, 4);
    at = put_byte(put_text(at, methods[step]), 0x91);
    switch (step) {
    case STEP_ACQUIRE:
    case STEP_CONTEND:
        snprintf(other, sizeof other, step == STEP_CONTEND ? "other-%s" : "%s", c->holder);
        at = put_ttl(put_pair(put_pair(put_byte(at, 0x83 + with_id), "key", c->key), "holder", other));
        if (with_id) {
            snprintf(id, sizeof id, "%016llx%016llx", (unsigned long long)draw(&c->random), (unsigned long long)draw(&c->random));
            at = put_pair(at, "request_id", id);
        }
        break;
    case STEP_RENEW:
        at = put_pair(put_pair(put_pair(put_byte(at, 0x84), "key", c->key), "holder", c->holder), "fence", c->fence);
        at = put_ttl(at);
        break;
    case STEP_RELEASE:
        at = put_pair(put_pair(put_byte(at, 0x82), "key", c->key), "fence", c->fence);
        break;
    default:
        at = put_pair(put_byte(at, 0x81), "key", c->key);
    }
    return (size_t)(at - out);
}

/* Reading.  `short_of` is set when bytes are missing, `bad` when no further bytes could mend it. */
struct cursor {
    const unsigned char *at, *end;
    bool short_of, bad;
};

static uint64_t take(struct cursor *c, unsigned bytes) {
    uint64_t value = 0;
    if ((size_t)(c->end - c->at) < bytes) {
        c->short_of = true;
        return 0;
    }
    while (bytes--)
        value = value << 8 | *c->at++;
    return value;
}

enum kind { KIND_NIL, KIND_FALSE, KIND_TRUE, KIND_INT, KIND_FLOAT, KIND_TEXT, KIND_ARRAY, KIND_MAP, KIND_NONE };

struct value {
    enum kind kind;
    uint64_t number; /* the integer, or the size of text, array or map */
    const char *text;
};

/* One value, or the head of an array or map.  Extension types are not spoken here. */
static struct value next(struct cursor *c) {
    struct value v = {.kind = KIND_NONE};
    unsigned first = (unsigned)take(c, 1);
    if (c->short_of)
        return v;
    if (first < 0x80) v = (struct value){KIND_INT, first, NULL};
    else if (first < 0x90) v = (struct value){KIND_MAP, first & 15, NULL};
    else if (first < 0xa0) v = (struct value){KIND_ARRAY, first & 15, NULL};
    else if (first < 0xc0) v = (struct value){KIND_TEXT, first & 31, NULL};
    else if (first == 0xc0) v.kind = KIND_NIL;
    else if (first == 0xc2) v.kind = KIND_FALSE;
    else if (first == 0xc3) v.kind = KIND_TRUE;
    else if (first >= 0xc4 && first <= 0xc6) v = (struct value){KIND_TEXT, take(c, 1u << (first - 0xc4)), NULL};
    else if (first == 0xca || first == 0xcb) v = (struct value){KIND_FLOAT, take(c, first == 0xca ? 4 : 8), NULL};
    else if (first >= 0xcc && first <= 0xcf) v = (struct value){KIND_INT, take(c, 1u << (first - 0xcc)), NULL};
    else if (first >= 0xd0 && first <= 0xd3) v = (struct value){KIND_INT, take(c, 1u << (first - 0xd0)), NULL};
    else if (first >= 0xd9 && first <= 0xdb) v = (struct value){KIND_TEXT, take(c, 1u << (first - 0xd9)), NULL};
    else if (first == 0xdc || first == 0xdd) v = (struct value){KIND_ARRAY, take(c, first == 0xdc ? 2 : 4), NULL};
    else if (first == 0xde || first == 0xdf) v = (struct value){KIND_MAP, take(c, first == 0xde ? 2 : 4), NULL};
    else if (first >= 0xe0) v.kind = KIND_INT;
    else c->bad = true;
    if (v.kind == KIND_TEXT && !c->short_of) {
        if (v.number > (uint64_t)(c->end - c->at))
            c->short_of = true;
        else {
            v.text = (const char *)c->at;
            c->at += v.number;
        }
    }
    return v;
}

static void skip(struct cursor *c, unsigned depth) {
    struct value v = next(c);
    uint64_t inner = v.kind == KIND_ARRAY ? v.number : v.kind == KIND_MAP ? 2 * v.number : 0;
    if (depth > 16)
        c->bad = true;
    for (uint64_t i = 0; i < inner && !c->short_of && !c->bad; i++)
        skip(c, depth + 1);
}

static bool is(struct value name, const char *text) {
    return name.kind == KIND_TEXT && name.number == strlen(text) && !memcmp(name.text, text, name.number);
}

/* acquired and held are true, false or nil; nil is the daemon's "unknown". */
static enum verdict three(enum kind kind, enum verdict yes, enum verdict no) {
    return kind == KIND_TRUE ? yes : kind == KIND_FALSE ? no : kind == KIND_NIL ? VERDICT_UNKNOWN : VERDICT_FAULT;
}

static ssize_t reply(struct connection *c, enum step step, const char *in, size_t size, struct answer *answer) {
    const unsigned char *start = (const unsigned char *)in;
    struct cursor whole = {.at = start, .end = start + size}, at = whole;
    bool renewed = false, has_fence = false;
    skip(&whole, 0);
    if (whole.bad)
        return -1;
    if (whole.short_of)
        return 0;
    struct value head = next(&at), type = next(&at), msgid = next(&at), error = next(&at);
    if (head.kind != KIND_ARRAY || head.number != 4 || type.kind != KIND_INT || type.number != 1 || msgid.kind != KIND_INT)
        return -1;
    answer->msgid = (uint32_t)msgid.number;
    struct value map = error.kind == KIND_NIL ? next(&at) : error;
    if (map.kind != KIND_MAP)
        return whole.at - start; /* an error: answer->verdict is VERDICT_FAULT as it came in */
    for (uint64_t i = 0; i < map.number; i++) {
        struct value name = next(&at);
        struct cursor before = at;
        skip(&at, 1);
        struct value value = next(&before);
        if (is(name, "acquired"))
            answer->verdict = three(value.kind, VERDICT_GRANTED, VERDICT_REFUSED);
        else if (is(name, "released"))
            answer->verdict = three(value.kind, VERDICT_RELEASED, VERDICT_REFUSED);
        else if (is(name, "held"))
            answer->verdict = three(value.kind, VERDICT_HELD, VERDICT_FREE);
        else if (is(name, "renewed"))
            renewed = value.kind == KIND_TRUE;
        else if (is(name, "generation") && value.kind == KIND_INT)
            answer->generation = value.number;
        else if (is(name, "fence") && value.kind == KIND_TEXT && value.number && value.number < sizeof c->fence) {
            memcpy(c->fence, value.text, value.number);
            c->fence[value.number] = 0;
            has_fence = true;
        }
    }
    if (answer->verdict == VERDICT_GRANTED && !has_fence)
        return -1;
    if (answer->verdict == VERDICT_GRANTED && renewed)
        answer->verdict = VERDICT_RENEWED;
    if (step == STEP_RENEW && answer->verdict == VERDICT_RENEWED && answer->generation != c->generation)
        return -1;
    return whole.at - start;
}

const struct wire wire_leased = {.name = "leased", .renews = true, .has_msgid = true, .request = request, .reply = reply};
