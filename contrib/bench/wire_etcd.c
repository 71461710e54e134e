/* etcd: the v3 JSON gateway over HTTP/1.1.

   Every connection takes one etcd lease first and hangs all its keys on it (a lease per acquisition would cost etcd two more calls).
   Acquire is a transaction that creates the key only when it does not exist; its revision is the generation.  Release deletes the key
   only while its create_revision is that generation.  Fields that are zero or false are absent from etcd's replies. */
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char *base64(const char *text, char *out) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t size = strlen(text);
    char *at = out;
    for (size_t i = 0; i < size; i += 3) {
        unsigned rest = (unsigned)(size - i), word = (unsigned)(unsigned char)text[i] << 16;
        word |= rest > 1 ? (unsigned)(unsigned char)text[i + 1] << 8 : 0;
        word |= rest > 2 ? (unsigned)(unsigned char)text[i + 2] : 0;
        *at++ = digits[word >> 18];
        *at++ = digits[word >> 12 & 63];
        *at++ = rest > 1 ? digits[word >> 6 & 63] : '=';
        *at++ = rest > 2 ? digits[word & 63] : '=';
    }
    *at = 0;
    return out;
}

static size_t post(char *out, const char *path, const char *body) {
    return (size_t)snprintf(out, MAX_REQUEST_BYTES, "POST %s HTTP/1.1\r\nHost: bench\r\nContent-Length: %zu\r\n\r\n%s", path,
                            strlen(body), body);
}

static size_t request(struct connection *c, enum step step, char *out) {
    char body[MAX_REQUEST_BYTES - 256], key[2 * MAX_TEXT], value[4 * MAX_TEXT], text[2 * MAX_TEXT + 8];
    base64(c->key, key);
    if (step == STEP_PREPARE) {
        snprintf(body, sizeof body, "{\"TTL\": %u}", options.ttl_seconds);
        return post(out, "/v3/lease/grant", body);
    }
    if (step == STEP_RELEASE) {
        snprintf(body, sizeof body,
                 "{\"compare\": [{\"key\": \"%s\", \"target\": \"CREATE\", \"result\": \"EQUAL\", \"create_revision\": \"%llu\"}],"
                 " \"success\": [{\"request_delete_range\": {\"key\": \"%s\"}}]}",
                 key, (unsigned long long)c->generation, key);
        return post(out, "/v3/kv/txn", body);
    }
    if (step == STEP_ACQUIRE)
        snprintf(c->fence, sizeof c->fence, "%llu", (unsigned long long)(draw(&c->random) >> 1));
    snprintf(text, sizeof text, step == STEP_CONTEND ? "other-%s:%s" : "%s:%s", c->holder, c->fence);
    snprintf(body, sizeof body,
             "{\"compare\": [{\"key\": \"%s\", \"target\": \"CREATE\", \"result\": \"EQUAL\", \"create_revision\": \"0\"}],"
             " \"success\": [{\"request_put\": {\"key\": \"%s\", \"value\": \"%s\", \"lease\": \"%s\"}}],"
             " \"failure\": [{\"request_range\": {\"key\": \"%s\"}}]}",
             key, key, base64(text, value), c->lease_id, key);
    return post(out, "/v3/kv/txn", body);
}

/* The number in `"name":"123"`; 0 when the field is absent, as etcd leaves out zeros. */
static unsigned long long field(const char *body, const char *name) {
    char pattern[48];
    snprintf(pattern, sizeof pattern, "\"%s\":\"", name);
    const char *at = strstr(body, pattern);
    return at ? strtoull(at + strlen(pattern), NULL, 10) : 0;
}

static ssize_t reply(struct connection *c, enum step step, const char *in, size_t size, struct answer *answer) {
    const char *head_end = memmem(in, size, "\r\n\r\n", 4);
    char text[8192];
    size_t length = 0;
    bool has_length = false;
    if (size >= 5 && memcmp(in, "HTTP/", 5))
        return -1;
    if (!head_end)
        return 0;
    for (const char *line = in; line < head_end; line = (const char *)memchr(line, '\n', size - (size_t)(line - in)) + 1)
        if (!strncasecmp(line, "Content-Length:", 15)) {
            length = strtoul(line + 15, NULL, 10);
            has_length = true;
        }
    size_t head = (size_t)(head_end - in) + 4;
    if (!has_length || length >= sizeof text)
        return -1;
    if (size < head + length)
        return 0;
    memcpy(text, in + head, length);
    text[length] = 0;
    if (strncmp(in + 8, " 200 ", 5))
        return (ssize_t)(head + length); /* the verdict stays a fault */
    bool succeeded = strstr(text, "\"succeeded\":true");
    if (step == STEP_PREPARE && field(text, "ID")) {
        snprintf(c->lease_id, sizeof c->lease_id, "%llu", field(text, "ID"));
        answer->verdict = VERDICT_PREPARED;
    } else if (step == STEP_RELEASE) {
        answer->verdict = succeeded && field(text, "deleted") == 1 ? VERDICT_RELEASED : VERDICT_REFUSED;
    } else if (succeeded) {
        answer->generation = field(text, "revision");
        answer->verdict = VERDICT_GRANTED;
    } else if (field(text, "create_revision")) {
        answer->verdict = VERDICT_REFUSED; /* the failure branch showed the holder's record */
    }
    return (ssize_t)(head + length);
}

const struct wire wire_etcd = {.name = "etcd", .prepares = true, .request = request, .reply = reply};
