/* A closed-loop load generator: N connections, one outstanding request each, one epoll loop, one thread.

   Every reply is parsed and must be the one the workload calls for: a refusal where a grant is due ends the run with the reply shown
   (exit 3), so a number can never come from a server that answers quickly and wrongly.  The result is one JSON object on standard
   output.  `generator_cpu` tells how much of one core the generator itself used: near 1.0, it and not the server was the limit. */
#include "load.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CONNECTIONS = 1024, MAX_TTL_SECONDS = 3600, MAX_PHASE_STEPS = 3 };

static const struct plan plans[] = {
    {"pairs", {{0}, {STEP_ACQUIRE, STEP_RELEASE}, {0}}, {0, 2, 0}},
    {"renew", {{STEP_ACQUIRE}, {STEP_RENEW}, {STEP_RELEASE}}, {1, 1, 1}},
    {"refuse", {{STEP_ACQUIRE}, {STEP_CONTEND}, {STEP_RELEASE}}, {1, 1, 1}},
    {"check", {{STEP_ACQUIRE}, {STEP_CHECK}, {STEP_RELEASE}}, {1, 1, 1}},
    {"preload", {{0}, {STEP_ACQUIRE}, {0}}, {0, 1, 0}},
};
static const struct wire *const wires[] = {&wire_leased, &wire_redis, &wire_etcd};
static const char usage[] =
    "usage: load leased|redis|etcd ADDRESS [--mode pairs|renew|refuse|check|preload] [--connections N] [--seconds S] [--warmup S]\n"
    "            [--ttl SECONDS] [--key-range N] [--request-id] [--first N] [--count N] [--in-flight N]\n"
    "ADDRESS is the path of a Unix socket or a numeric IPv4:PORT.\n"
    "pairs: acquire and release, keys at random; renew, refuse, check: of one held key per connection;\n"
    "preload: --count grants of the keys from --first on, which stay; --in-flight of them unanswered per connection.\n";

const char *const step_names[STEP_COUNT] = {"prepare", "acquire", "release", "renew", "contend", "check"};
struct options options = {
    .mode = "pairs", .connections = 1, .seconds = 3, .warmup = 0.5, .ttl_seconds = 60, .key_range = 1000000, .count = 10000, .in_flight = 1,
};
struct plan plan;
const struct wire *wire;
bool preloading;

void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("load: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(2);
}

/* splitmix64: full period, no shared state between connections. */
uint64_t draw(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int compare(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

static void print_samples(const char *before, const char *name, struct samples *s) {
    if (!s->count)
        return;
    qsort(s->ns, s->count, sizeof *s->ns, compare);
    printf("%s\"%s\": {\"count\": %zu, \"p50\": %.1f, \"p99\": %.1f, \"max\": %.1f}", before, name, s->count,
           (double)s->ns[s->count / 2] / 1e3, (double)s->ns[s->count - 1 - s->count / 100] / 1e3, (double)s->ns[s->count - 1] / 1e3);
}

static void print_outcome(struct outcome *o) {
    printf("{\"protocol\": \"%s\", \"mode\": \"%s\", \"connections\": %u, ", wire->name, options.mode, options.connections);
    if (preloading) {
        printf("\"count\": %" PRIu64 ", \"seconds\": %.3f, \"per_second\": %.1f}\n", o->granted, o->elapsed_seconds,
               (double)o->granted / o->elapsed_seconds);
        return;
    }
    printf("\"count\": %" PRIu64 ", \"seconds\": %.3f, \"per_second\": %.1f, \"generator_cpu\": %.2f, \"latency_us\": {", o->loops,
           options.seconds, (double)o->loops / options.seconds, o->cpu_seconds / options.seconds);
    print_samples("", "loop", &o->loop);
    for (unsigned step = 0; step < STEP_COUNT; step++)
        print_samples(", ", step_names[step], &o->step[step]);
    printf("}}\n");
}

static void set_option(const char *name, const char *value) {
    char *end = NULL;
    double number = value ? strtod(value, &end) : -1;
    if (!strcmp(name, "--mode") && value) {
        options.mode = value;
        return;
    }
    if (!value || end == value || *end || number < 0 || number > 1e15)
        die("%s needs a number that is not negative", name);
    if (!strcmp(name, "--connections"))
        options.connections = (unsigned)number;
    else if (!strcmp(name, "--seconds"))
        options.seconds = number;
    else if (!strcmp(name, "--warmup"))
        options.warmup = number;
    else if (!strcmp(name, "--ttl"))
        options.ttl_seconds = (unsigned)number;
    else if (!strcmp(name, "--key-range"))
        options.key_range = (uint64_t)number;
    else if (!strcmp(name, "--first"))
        options.first = (uint64_t)number;
    else if (!strcmp(name, "--count"))
        options.count = (uint64_t)number;
    else if (!strcmp(name, "--in-flight"))
        options.in_flight = (unsigned)number;
    else
        die("unknown option %s\n%s", name, usage);
}

static void read_arguments(int argc, char **argv) {
    for (size_t i = 0; argc >= 3 && i < sizeof wires / sizeof *wires; i++)
        if (!strcmp(argv[1], wires[i]->name))
            wire = wires[i];
    for (int i = 3; i < argc; i++) {
        if (!strcmp(argv[i], "--request-id")) {
            options.request_id = true;
            continue;
        }
        set_option(argv[i], i + 1 < argc ? argv[i + 1] : NULL);
        i++;
    }
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++)
        if (!strcmp(options.mode, plans[i].mode))
            plan = plans[i];
    if (!wire || !plan.mode)
        die("which protocol, where, which mode?\n%s", usage);
    if (options.connections < 1 || options.connections > MAX_CONNECTIONS || options.ttl_seconds < 1 ||
        options.ttl_seconds > MAX_TTL_SECONDS || !options.key_range || !options.in_flight || options.seconds <= 0)
        die("an argument is out of range\n%s", usage);
    options.address = argv[2];
    preloading = !strcmp(options.mode, "preload");
    if (!wire->renews && (!strcmp(options.mode, "renew") || !strcmp(options.mode, "check")))
        die("mode %s is not written for %s", options.mode, wire->name);
    /* A lease that lapses under the workload would turn its refusals into grants. */
    if (!preloading && options.seconds + options.warmup > options.ttl_seconds / 2.0)
        die("--seconds and --warmup together must be at most half of --ttl");
    if (wire->prepares) {
        enum step *setup = plan.steps[PHASE_SETUP];
        memmove(setup + 1, setup, sizeof *setup * (MAX_PHASE_STEPS - 1));
        setup[0] = STEP_PREPARE;
        plan.size[PHASE_SETUP]++;
    }
}

int main(int argc, char **argv) {
    static struct outcome outcome;
    read_arguments(argc, argv);
    run_loop(&outcome);
    print_outcome(&outcome);
    return 0;
}
