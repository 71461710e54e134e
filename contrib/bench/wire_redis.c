/* Redis: the fenced lease as Lua scripts over RESP2.

   The value of a key is "holder:fence", the fence drawn by the client; a generation is drawn from one counter at each grant.  Release
   is compare-and-delete, renewal compare-and-PEXPIRE, check a plain GET. */
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ACQUIRE, RELEASE, RENEW, SCRIPTS };

static const char *const scripts[SCRIPTS] = {
    "if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return redis.call('INCR', KEYS[2]) end return 0",
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0",
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0",
};
static char digests[SCRIPTS][41];

static size_t command(char *out, int words, const char *const *word) {
    size_t size = (size_t)sprintf(out, "*%d\r\n", words);
    for (int i = 0; i < words; i++)
        size += (size_t)sprintf(out + size, "$%zu\r\n%s\r\n", strlen(word[i]), word[i]);
    return size;
}

/* SCRIPT LOAD, blocking: the reply is the digest that EVALSHA names. */
static void open_redis(int fd) {
    for (int i = 0; i < SCRIPTS; i++) {
        char bytes[MAX_REQUEST_BYTES];
        size_t size = command(bytes, 3, (const char *const[]){"SCRIPT", "LOAD", scripts[i]}), got = 0;
        if (write(fd, bytes, size) != (ssize_t)size)
            die("redis: SCRIPT LOAD could not be sent");
        while (got < 47) { /* "$40\r\n", 40 hexadecimal digits, "\r\n" */
            ssize_t more = read(fd, bytes + got, 47 - got);
            if (more <= 0 || bytes[0] != '$')
                die("redis: SCRIPT LOAD was refused");
            got += (size_t)more;
        }
        memcpy(digests[i], bytes + 5, 40);
    }
}

static size_t request(struct connection *c, enum step step, char *out) {
    char value[2 * MAX_TEXT + 8], ttl_ms[24];
    snprintf(ttl_ms, sizeof ttl_ms, "%llu", (unsigned long long)options.ttl_seconds * 1000);
    if (step == STEP_CHECK)
        return command(out, 2, (const char *const[]){"GET", c->key});
    if (step == STEP_ACQUIRE)
        snprintf(c->fence, sizeof c->fence, "%llu", (unsigned long long)(draw(&c->random) >> 1));
    snprintf(value, sizeof value, step == STEP_CONTEND ? "other-%s:%s" : "%s:%s", c->holder, c->fence);
    switch (step) {
    case STEP_RELEASE:
        return command(out, 5, (const char *const[]){"EVALSHA", digests[RELEASE], "1", c->key, value});
    case STEP_RENEW:
        return command(out, 6, (const char *const[]){"EVALSHA", digests[RENEW], "1", c->key, value, ttl_ms});
    default:
        return command(out, 7, (const char *const[]){"EVALSHA", digests[ACQUIRE], "2", c->key, "bench-generation", value, ttl_ms});
    }
}

static ssize_t reply(struct connection *c, enum step step, const char *in, size_t size, struct answer *answer) {
    static const enum verdict yes[STEP_COUNT] = {
        VERDICT_FAULT, VERDICT_GRANTED, VERDICT_RELEASED, VERDICT_RENEWED, VERDICT_GRANTED, VERDICT_FAULT,
    };
    const char *line_end = memchr(in, '\n', size);
    (void)c;
    if (!line_end)
        return 0;
    if (line_end == in || line_end[-1] != '\r' || !strchr(":$+-", in[0]))
        return -1;
    long long number = strtoll(in + 1, NULL, 10);
    ssize_t consumed = line_end + 1 - in;
    if (in[0] == '$') {
        if (number >= 0)
            consumed += number + 2;
        if ((size_t)consumed > size)
            return 0;
        if (step == STEP_CHECK)
            answer->verdict = number > 0 ? VERDICT_HELD : VERDICT_FREE;
    } else if (in[0] == ':' && number >= 0 && step != STEP_CHECK) {
        answer->verdict = number ? yes[step] : VERDICT_REFUSED;
        answer->generation = (uint64_t)number;
    }
    return consumed;
}

const struct wire wire_redis = {.name = "redis", .renews = true, .open = open_redis, .request = request, .reply = reply};
