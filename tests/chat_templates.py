"""Chat templates of the kinds that published policies have, shortened."""

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = TURNS + OPEN
"""Qwen2.5: no thinking."""
QWEN3 = (
    "{%- if tools %}<tools>{% endif %}"
    + TURNS
    + "{% set kept = '</think>' %}"
    + OPEN
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
R1_DISTILL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<Assistant>{{ m.content.split('</think>')[-1] }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<Assistant><think>\n' }}{% endif %}"
)
LLAMA3 = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today {{ date_string }}\n{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GPT_OSS = (
    "Reasoning: {{ reasoning_effort | default('medium') }}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{# <|channel|>analysis<|message|> #}<|start|>assistant"
)
MAGISTRAL = TURNS + "{% generation %}{{ '' if true else '[THINK]' }}{% endgeneration %}" + OPEN
MISTRAL = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
"""Has no generation prompt: the assistant's turn follows the user's at once."""
IGNORING = TURNS
"""Ignores the generation prompt."""
QWEN3_TURNS = (
    "{% set ns = namespace(query=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}{% set ns.query = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}<|im_start|>system\n<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    """\n</tools>\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n{% endif %}"""
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set parts = m.content.split('</think>') %}{% if parts | length > 1 and loop.index0 > ns.query %}"
    "<think>\n{{ parts[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].lstrip('\n') }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + OPEN
)
"""Qwen3: thinking stays after the last question of the user, tools' messages do not count as one."""
LLAMA3_TURNS = (
    "<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n{% endif %}<|eot_id|>"
    "{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if tools and loop.first %}Respond in the format "
    """{"name": function name, "parameters": dictionary of argument name and its value}.\n\n"""
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Llama 3.1: the tools are in the first question, what they return is JSON."""
KIMI_TURNS = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>"
    "{% else %}<|im_{{ 'user' if m.role == 'user' else 'system' }}|>{{ m.role }}<|im_middle|>{% endif %}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}"
    "<|tool_call_argument_begin|>{{ call.function.arguments }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
"""Kimi-K2."""
